"""Sums over the tokens of each response.

Shapes: T response tokens of a micro-batch.

Between the engine that samples and the one that trains: how much each token counts where they do not agree.

Shapes: T response tokens of a micro-batch.

What training minimises: functions of one response token.

Shapes: T response tokens of a micro-batch. Only methods of tensors are used, so that nothing is imported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from rlflow.errors import RecipeError
from rlflow.nodes.kl import Estimator, kl_estimate, ratio
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor


def sums_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """[T]: for each token the sum of ``values`` [T] over its response, whose number is in ``rows`` [T].

    Gradients flow to ``values``. Where ranks share a sequence each has the values of all its tokens, so sums are whole.
    """
    # There are at least as many tokens as responses. Unlike index_add, this adds up in one order on GPUs too.
    sums = values.new_zeros(len(values)).index_put((rows,), values, accumulate=True)
    return sums[rows]


def means_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """[T]: for each token the mean of ``values`` [T] over its response."""
    return sums_over_responses(values, rows) / sums_over_responses(values.detach().new_ones(len(values)), rows)


@dataclass(frozen=True, kw_only=True)
class Correction(Section):
    """The ratio of the trainer's probability, before the update, to the sampler's, within bounds: an importance weight.

    Source: with ``level: token, outside: bound`` TIS (https://fengyao.notion.site/off-policy-rl); with ``token`` and
    ``mask`` IcePop (arXiv 2510.18855); with ``sequence`` and ``mask`` masked importance sampling, where
    the ratio is that of whole responses (https://richardli.xyz/rl-collapse).
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, the product over its response, or the geometric mean over its response."""
    outside: Literal["bound", "mask"] = "bound"
    """What is outside of the bounds counts as much as the bound, or nothing."""
    max_ratio: Annotated[float, Gt(0)] = 2.0
    min_ratio: Annotated[float, Ge(0)] = 0.0

    def expression(self, sampler: str) -> str:
        """Return the weight for people; ``sampler`` gives the logprobs that were sampled with."""
        of = {"token": "", "sequence": " of the response", "geometric": " of the response, geometric mean"}[self.level]
        ratio = f"(p_old / p by {sampler}{of})"
        if self.outside == "bound":
            return f"clip({ratio}, {self.min_ratio:g}, {self.max_ratio:g})"
        return f"{ratio}, 0 outside of {self.min_ratio:g} to {self.max_ratio:g}"

    def __call__(self, difference: "Tensor", rows: "Tensor") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Weights [T] from log(trainer / sampler) [T]; and metrics: the mean weight, and the share outside."""
        if self.level == "sequence":
            difference = sums_over_responses(difference, rows)
        elif self.level == "geometric":
            difference = means_over_responses(difference, rows)
        free = ratio(difference)
        bounded = free.clamp(self.min_ratio, self.max_ratio)
        outside = bounded != free
        weights = bounded if self.outside == "bound" else free.masked_fill(outside, 0.0)
        return weights, {"correction": weights, "corrected_fraction": outside.float()}


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
