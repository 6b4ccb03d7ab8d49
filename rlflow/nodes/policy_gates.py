"""Updates of a policy in which a gate takes the place of PPO's clipping: SAPO and DPPO.

Shapes: T response tokens of a micro-batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le

from rlflow.nodes.base import Formula, Node
from rlflow.nodes.kl import ratio
from rlflow.nodes.minibatches import Aggregation
from rlflow.nodes.policy_loss import clip_fractions
from rlflow.nodes.policy_update import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.nodes.policy_loss import Columns, Loss

# Keeps the logarithm finite where a probability is 1.
_SMALL = 1e-8


@dataclass(frozen=True, kw_only=True)
class SapoUpdate(PolicyGradient, Node, kind="sapo_update", unit="batch"):
    """SAPO: -g(r) A, g(r) = 4 / t sigmoid(t (r - 1)), a gate that falls smoothly where PPO clips.

    The slope of g is 1 at r = 1. The metric ``gate`` is the mean slope: the share of the gradient that is left.

    Source: arXiv 2511.20347.
    """

    aggregation: Aggregation = "sequence"
    temperature_positive: Annotated[float, Gt(0), Le(1e3)] = 1.0
    """The temperature t where the advantage is positive. A larger one closes the gate nearer to a ratio of 1."""
    temperature_negative: Annotated[float, Gt(0), Le(1e3)] = 1.05
    """The temperature elsewhere."""

    def surrogate_formula(self, advantage: str) -> Formula:
        temperatures = f"{self.temperature_positive:g} where {advantage} > 0, else {self.temperature_negative:g}"
        where = {"t": temperatures, "w": "p / p_old"}
        return Formula(symbol="L", expression=f"-4 / t sigmoid(t (w - 1)) {advantage}", where=where)

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        advantages = columns["advantages"]
        temperature = advantages.new_full(advantages.shape, self.temperature_negative)
        temperature = temperature.masked_fill(advantages > 0, self.temperature_positive)
        share = (temperature * (ratio(logprobs - columns["old_logprobs"]) - 1)).sigmoid()
        return -4 / temperature * share * advantages, {"gate": 4 * share * (1 - share)}


@dataclass(frozen=True, kw_only=True)
class DppoUpdate(PolicyGradient, Node, kind="dppo_update", unit="batch"):
    """DPPO: -min(r, bound) A log p, without a gradient through r, for tokens whose probability has not moved too far.

    A token is left out once its distribution is ``max_divergence`` away from the old one in the direction of its
    advantage. The distribution counts as one of two outcomes: this token and all others.

    Source: arXiv 2602.04879, equations 13 and 14 for the divergence.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """The total variation |p - p_old|, or the KL divergence from the old distribution."""
    max_divergence: Annotated[float, Gt(0), Le(100)] = 0.15
    """The largest divergence. From p_old = 0.5, a total variation of 0.15 is a KL divergence of 0.05."""
    max_ratio: Annotated[float, Ge(1), Le(1e9)] = 20.0
    """The bound of the ratio."""

    def surrogate_formula(self, advantage: str) -> Formula:
        divergence = {
            "tv": "|p - p_old|",
            "kl": "p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))",
        }[self.divergence]
        away = f"w is above 1 where {advantage} > 0, or below 1 where {advantage} < 0"
        where = {
            "w": "p / p_old, without a gradient",
            "gate": f"0 where D > {self.max_divergence:g} and {away}, else 1",
            "D": divergence,
        }
        return Formula(symbol="L", expression=f"-gate min(w, {self.max_ratio:g}) {advantage} log p", where=where)

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        advantages, old, new = columns["advantages"], columns["old_logprobs"], logprobs.detach()
        moved_up = new - old
        is_closed = (self._divergence(old, new) > self.max_divergence) & (moved_up * advantages > 0)
        bounded = ratio(moved_up).clamp(max=self.max_ratio)
        loss = (-bounded * advantages * logprobs).masked_fill(is_closed, 0.0)
        return loss, clip_fractions(is_closed, advantages)

    def _divergence(self, old: "Tensor", new: "Tensor") -> "Tensor":
        """Return the divergence [T] of each token's distribution from the old one, by their logprobs [T]."""
        p_old, p = old.exp(), new.exp()
        if self.divergence == "tv":
            return (p - p_old).abs()
        return p_old * (old - new) + (1 - p_old) * ((1 - p_old + _SMALL) / (1 - p + _SMALL)).log()
