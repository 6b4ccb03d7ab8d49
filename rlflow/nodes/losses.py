"""What training minimises: functions of one response token.

Shapes: T response tokens of a micro-batch. Only methods of tensors are used, so that nothing is imported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.errors import RecipeError
from rlflow.nodes.correction import Correction
from rlflow.nodes.kl import Estimator, kl_estimate
from rlflow.nodes.ratio import ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A surrogate, times the ``correction``; plus the KL divergence to the reference, minus the entropy, each times its
    coefficient.

    Columns: ``old_logprobs`` and ``advantages``, and ``reference`` and ``sampler_logprobs`` where there are any;
    ``rows``; and ``entropy`` from engines that know it, which is a metric in any case.
    """

    surrogate: "Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]"
    """From the model's logprobs [T] and the columns to a loss [T] and metrics [T]."""
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    correction: Correction | None = None

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        loss, measured = self.surrogate(logprobs, columns)
        metrics = {**measured, "logprob_change": (logprobs - columns["old_logprobs"]).abs()}
        if "sampler_logprobs" in columns:
            apart = columns["old_logprobs"] - columns["sampler_logprobs"]
            # The divergence from the sampler to the trainer, by k3: the tokens are the sampler's.
            metrics |= {"sampler_difference": apart.abs(), "sampler_kl": kl_estimate("k3", -apart, ratio(apart))}
            if self.correction is not None:
                weights, corrected = self.correction(apart, columns["rows"])
                loss, metrics = loss * weights, {**metrics, **corrected}
        if "reference" in columns:
            difference = logprobs - columns["reference"]
            kl = kl_estimate(self.kl_estimator, difference, ratio(-difference))
            loss, metrics["kl"] = loss + self.kl_coef * kl, kl
        if "entropy" in columns:
            metrics["entropy"] = columns["entropy"]
        if self.entropy_coef:
            if "entropy" not in columns:
                raise RecipeError("entropy_coef", "the engine does not know its entropies", fix="entropy_coef: 0")
            loss = loss - self.entropy_coef * columns["entropy"]
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class LikelihoodLoss:
    """The negative log-likelihood of the response."""

    temperature: float = 1.0

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        return -logprobs, {}
