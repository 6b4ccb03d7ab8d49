"""The losses that training a policy minimizes: functions of single response tokens.

Only methods of tensors are used, so this file imports no torch.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from rlflow.engines.base import Entropy
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.kl import Estimator, kl_estimate, ratio
from rlflow.schema import Section

if TYPE_CHECKING:
    from torch import Tensor

    Columns = Mapping[str, Tensor]
    Loss = tuple[Tensor, Mapping[str, Tensor]]

CLIPPING: Mapping[str, str] = {
    "clip_ratio": "clip_eps",
    "clip_ratio_low": "clip_eps",
    "clip_ratio_high": "clip_eps_high",
    "epsilon": "clip_eps",
    "epsilon_high": "clip_eps_high",
}
DUAL_CLIPPING: Mapping[str, str] = {"clip_ratio_c": "dual_clip", "delta": "dual_clip"}


@dataclass(frozen=True, kw_only=True)
class Correction(Section):
    """An importance weight for the difference between the engine that samples and the engine that trains.

    The weight is the ratio of the trainer's probability, before the update, to the sampler's, within bounds.

    Source: with ``level: token, outside: bound`` TIS (https://fengyao.notion.site/off-policy-rl); with ``token`` and
    ``mask`` IcePop (arXiv 2510.18855); with ``sequence`` and ``mask`` masked importance sampling, where
    the ratio is that of whole responses (https://richardli.xyz/rl-collapse).
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, the product over its response, or the geometric mean over its response."""
    outside: Literal["bound", "mask"] = "bound"
    """The weight of a ratio outside of the bounds: the bound itself, or 0."""
    max_ratio: Annotated[float, Ge(1), Le(1e9)] = 2.0
    """The upper bound of the ratio, which is 1 where both engines agree."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """The lower bound of the ratio."""

    def check(self, connected: frozenset[str]) -> None:
        """Raise a UserError, its path counted from the node, for a missing input or bounds that no ratio is between."""
        if "old_logprobs" not in connected:
            fact = "needs the logprobs of the role that is trained, and there is no node 'old_logprobs'"
            fix = "add old_logprobs: {node: logprobs, role: actor}, or correction: null"
            raise GraphError("correction", fact, fix=fix)
        if self.min_ratio == self.max_ratio:
            fact = "1 is max_ratio as well, so no ratio between them is left"
            raise RecipeError("correction.min_ratio", fact, fix="use less than 1, or a larger max_ratio")

    def expression(self, sampler: str) -> str:
        """Return the weight as a formula for people; ``sampler`` is the node whose logprobs were sampled with."""
        level = {"token": "", "sequence": " of the response", "geometric": " of the response, geometric mean"}
        ratio = f"(p_old / p by {sampler}{level[self.level]})"
        if self.outside == "bound":
            return f"clip({ratio}, {self.min_ratio:g}, {self.max_ratio:g})"
        return f"{ratio}, 0 outside of {self.min_ratio:g} to {self.max_ratio:g}"

    def __call__(self, difference: "Tensor", rows: "Tensor") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return weights [T] from log(trainer / sampler) [T], and as metrics the mean weight and the share outside."""
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
    """The loss of a policy's update: surrogate x correction + kl_coef x KL divergence - entropy_coef x entropy.

    Columns: ``advantages`` and ``rows``; ``old_logprobs``, without which the model itself is the old one; ``reference``
    and ``sampler_logprobs`` where such nodes are connected; ``entropy`` from engines that know it, which is a metric in
    any case.
    """

    surrogate: "Callable[[Tensor, Columns], Loss]"
    """From the model's logprobs [T] and the columns to a loss [T] and metrics [T]."""
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    unbiased_kl: bool = False
    """The divergence counts with the ratio to the old policy, gradient included."""
    entropy_coef: float = 0.0
    correction: Correction | None = None
    off_policy_mask: float | None = None

    @property
    def entropy(self) -> Entropy:
        """Return the use of entropies, which are a metric in any case."""
        return "trained" if self.entropy_coef else "reported"

    def __call__(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        """Return the loss [T] and metrics [T]."""
        columns = {"old_logprobs": logprobs.detach(), **columns}
        loss, surrogate_metrics = self.surrogate(logprobs, columns)
        metrics = {**surrogate_metrics, "logprob_change": (logprobs - columns["old_logprobs"]).abs()}
        if self.off_policy_mask is not None:
            is_masked = is_off_policy(logprobs.detach(), columns, self.off_policy_mask)
            loss, metrics["off_policy_masked"] = loss.masked_fill(is_masked, 0.0), is_masked.to(loss.dtype)
        if "sampler_logprobs" in columns:
            difference = columns["old_logprobs"] - columns["sampler_logprobs"]
            # The divergence from the sampler to the trainer, by k3: the tokens are the sampler's.
            sampler_kl = kl_estimate("k3", -difference, ratio(difference))
            metrics |= {"sampler_difference": difference.abs(), "sampler_kl": sampler_kl}
            if self.correction is not None:
                weights, correction_metrics = self.correction(difference, columns["rows"])
                loss, metrics = loss * weights, {**metrics, **correction_metrics}
        if "reference" in columns:
            difference = logprobs - columns["reference"]
            kl = kl_estimate(self.kl_estimator, difference, ratio(-difference))
            metrics["kl"] = kl
            weighted = kl * ratio(logprobs - columns["old_logprobs"]) if self.unbiased_kl else kl
            loss = loss + self.kl_coef * weighted
        if "entropy" in columns:
            metrics["entropy"] = columns["entropy"]
        if self.entropy_coef:
            if "entropy" not in columns:
                raise RecipeError("entropy_coef", "the engine does not compute entropies", fix="entropy_coef: 0")
            loss = loss - self.entropy_coef * columns["entropy"]
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class LikelihoodLoss:
    """The negative log-likelihood of the response."""

    temperature: float = 1.0
    entropy: Entropy = "unused"

    def __call__(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        """Return the loss [T], without metrics."""
        return -logprobs, {}


def is_off_policy(logprobs: "Tensor", columns: "Columns", bound: float) -> "Tensor":
    """Return the tokens [T] with a negative advantage in responses that the policy has left by more than ``bound``."""
    sampled = columns.get("sampler_logprobs", columns["old_logprobs"])
    return (columns["advantages"] < 0) & (means_over_responses(sampled - logprobs, columns["rows"]) > bound)


def clipped_surrogate(
    free: "Tensor", advantages: "Tensor", eps: float, eps_high: float | None, dual_clip: float | None = None
) -> "Loss":
    """Return PPO's loss [T] from the ratios ``free`` [T], and the shares of clipped tokens.

    ``dual_clip`` bounds the ratio where the advantage is negative, which nothing else does (arXiv 1912.09729,
    equation 5).
    """
    bounded = free.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high))
    gain = (free * advantages).minimum(bounded * advantages)
    is_clipped = free * advantages > bounded * advantages
    if dual_clip is None:
        return -gain, clip_fractions(is_clipped, advantages)
    least = (dual_clip * advantages).where(advantages < 0, gain)
    return -gain.maximum(least), clip_fractions(is_clipped | (least > gain), advantages)


def clipped_expression(advantage: str, eps: float, eps_high: float | None, dual_clip: float | None) -> str:
    """Return the loss of ``clipped_surrogate`` as a formula for people, w being the ratio."""
    high = eps if eps_high is None else eps_high
    term = f"-min(w {advantage}, clip(w, {1 - eps:g}, {1 + high:g}) {advantage})"
    return term if dual_clip is None else f"min({term}, {dual_clip:g} |{advantage}|)"


def check_clipping(low: float, high: float | None) -> None:
    """Raise RecipeError, its path counted from the node, for ratios that may grow less than they may fall."""
    if high is not None and high < low:
        fact = f"{high:g} is less than clip_eps, which is {low:g}"
        raise RecipeError("clip_eps_high", fact, fix=f"use {low:g} or more")


def clip_fractions(is_clipped: "Tensor", advantages: "Tensor") -> "Mapping[str, Tensor]":
    """Return the share of clipped tokens: of all, of those with a positive advantage, of those with a negative one."""
    share = is_clipped.to(advantages.dtype)
    return {
        "clip_fraction": share,
        "clip_fraction_positive": share.masked_fill(advantages <= 0, nan),
        "clip_fraction_negative": share.masked_fill(advantages >= 0, nan),
    }


def sums_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """Return for each token [T] the sum of ``values`` [T] over its response, whose number is in ``rows`` [T].

    Gradients flow to ``values``. Ranks that share a sequence each have the values of all its tokens, so sums are
    complete.
    """
    # There are at least as many tokens as responses. Unlike index_add, this adds up in one order on GPUs too.
    sums = values.new_zeros(len(values)).index_put((rows,), values, accumulate=True)
    return sums[rows]


def means_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """Return for each token [T] the mean of ``values`` [T] over its response."""
    return sums_over_responses(values, rows) / sums_over_responses(values.detach().new_ones(len(values)), rows)
