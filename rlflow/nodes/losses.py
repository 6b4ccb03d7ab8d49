"""What training minimises: functions of one response token.

Shapes: T response tokens of a micro-batch. Only methods of tensors are used, so that nothing is imported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss:
    """PPO's clipped surrogate, plus ``kl_coef`` times the KL divergence to the reference.

    Source: PPO (arXiv 1707.06347), equation 7; the KL estimator k3 = exp(d) - d - 1 with d = log(reference / policy)
    is that of DeepSeekMath (arXiv 2402.03300), equation 4, and of http://joschu.net/blog/kl-approx.html.
    Columns: ``old_logprobs`` and ``advantages``, and ``reference`` and ``sampler_logprobs`` where there are any; and
    ``entropy`` from engines that know it, which is a metric.
    """

    clip_eps: float
    kl_coef: float
    temperature: float

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        difference = logprobs - columns["old_logprobs"]
        ratio = difference.exp()
        advantages = columns["advantages"]
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps)
        loss = -(ratio * advantages).minimum(clipped * advantages)
        metrics = {
            "clip_fraction": ((ratio * advantages) > (clipped * advantages)).float(),
            "logprob_change": difference.abs(),
        }
        if "entropy" in columns:
            metrics["entropy"] = columns["entropy"]
        if "sampler_logprobs" in columns:
            metrics["sampler_difference"] = (columns["old_logprobs"] - columns["sampler_logprobs"]).abs()
        if "reference" in columns:
            towards = columns["reference"] - logprobs
            kl = towards.exp() - towards - 1
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class LikelihoodLoss:
    """The negative log-likelihood of the response."""

    temperature: float = 1.0

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        return -logprobs, {}
