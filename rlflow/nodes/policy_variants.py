"""Updates of a policy with other surrogates than PPO's: GSPO, GMPO, CISPO and REINFORCE.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from rlflow.nodes.base import Formula, Node, NodeView
from rlflow.nodes.kl import ratio
from rlflow.nodes.minibatches import Aggregation
from rlflow.nodes.policy_loss import (
    CLIPPING,
    DUAL_CLIPPING,
    check_clipping,
    clip_fractions,
    clipped_expression,
    clipped_surrogate,
    means_over_responses,
)
from rlflow.nodes.policy_update import PolicyGradient
from rlflow.schema import ClipDistance, ClipShare

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.nodes.policy_loss import Columns, Loss


@dataclass(frozen=True, kw_only=True)
class GspoUpdate(PolicyGradient, Node, kind="gspo_update", unit="batch"):
    """GSPO: PPO's surrogate with one ratio for a response, the geometric mean of its tokens' ratios.

    Source: arXiv 2507.18071, equations 5 to 7, and for ``per_token`` 13 and 14; the bounds are those of section 5.1.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {
        **PolicyGradient.hints_for_other_names,
        **CLIPPING,
        **DUAL_CLIPPING,
    }

    aggregation: Aggregation = "sequence"
    clip_eps: ClipShare = 3e-4
    """The distance below 1 at which the ratio of a response is clipped."""
    clip_eps_high: ClipDistance | None = 4e-4
    """The distance above 1. Null: the same as below."""
    dual_clip: Annotated[float, Gt(1), Le(1e9)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""
    per_token: bool = False
    """Let each token's gradient count with its own advantage (GSPO-token). The same where a response has only one."""

    def check(self, connected: frozenset[str]) -> None:
        super().check(connected)
        check_clipping(self.clip_eps, self.clip_eps_high)

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        mean = "exp(mean over the response of log(p / p_old))"
        ratio = f"{mean}, with the gradient of p alone" if self.per_token else mean
        return Formula(symbol="L", expression=term, where={"w": ratio})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        means = means_over_responses(logprobs - columns["old_logprobs"], columns["rows"])
        if self.per_token:
            means = means.detach() + (logprobs - logprobs.detach())
        ratios = ratio(means)
        return clipped_surrogate(ratios, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class GmpoUpdate(PolicyGradient, Node, kind="gmpo_update", unit="batch"):
    """GMPO: -w A, w the geometric mean of a response's ratios, each of them clipped in the direction of its advantage.

    Source: arXiv 2507.20673, whose bounds are exp(-0.4) and exp(0.4).
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **CLIPPING}

    aggregation: Aggregation = "sequence"
    clip_eps: Annotated[float, Gt(0), Le(20)] = 0.4
    """The distance below 0 at which the logarithm of a ratio is clipped."""
    clip_eps_high: Annotated[float, Gt(0), Le(20)] | None = None
    """The distance above 0. Null: the same as below."""

    def surrogate_formula(self, advantage: str) -> Formula:
        low, high = -self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high
        where = {
            "w": "exp(mean over the response of c)",
            "c": f"min(d, {high:g}) where {advantage} >= 0, else max(d, {low:g})",
            "d": "log(p / p_old)",
        }
        return Formula(symbol="L", expression=f"-w {advantage}", where=where)

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        free, advantages = logprobs - columns["old_logprobs"], columns["advantages"]
        high = self.clip_eps if self.clip_eps_high is None else self.clip_eps_high
        bounded = free.clamp(max=high).where(advantages >= 0, free.clamp(min=-self.clip_eps))
        loss = -ratio(means_over_responses(bounded, columns["rows"])) * advantages
        return loss, clip_fractions(bounded != free, advantages)


@dataclass(frozen=True, kw_only=True)
class CispoUpdate(PolicyGradient, Node, kind="cispo_update", unit="batch"):
    """CISPO: -clip(r) A log p, where no gradient flows through the ratio r: every token has one, none is dropped.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, whose experiments have no lower bound.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **CLIPPING}

    clip_eps: ClipShare | None = None
    """The distance below 1 at which the ratio is clipped. Null: without a bound."""
    clip_eps_high: ClipDistance = 4.0
    """The distance above 1."""

    def surrogate_formula(self, advantage: str) -> Formula:
        low = 0 if self.clip_eps is None else 1 - self.clip_eps
        term = f"-clip(w, {low:g}, {1 + self.clip_eps_high:g}) {advantage} log p"
        return Formula(symbol="L", expression=term, where={"w": "p / p_old, without a gradient"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        free = ratio(logprobs.detach() - columns["old_logprobs"])
        bounded = free.clamp(0 if self.clip_eps is None else 1 - self.clip_eps, 1 + self.clip_eps_high)
        advantages = columns["advantages"]
        return -bounded * advantages * logprobs, clip_fractions(bounded != free, advantages)


@dataclass(frozen=True, kw_only=True)
class ReinforceUpdate(PolicyGradient, Node, kind="reinforce_update", unit="batch"):
    """REINFORCE: -A log p. It has no ratio, so it is for one optimizer step on the policy's own responses."""

    def cautions(self, view: NodeView) -> Iterator[str]:
        yield from super().cautions(view)
        for option in ("num_minibatches", "num_epochs"):
            if (count := getattr(self, option)) > 1:
                yield (
                    f"{option}: is {count}, and this loss has no ratio: from the second optimizer step on it trains on "
                    "responses of an older policy as if they were its own; use 1, or policy_update"
                )

    def mismatch_cautions(self, view: NodeView) -> Iterator[str]:
        yield (
            f"correction: is missing, so responses of {' and '.join(view.samplers)} count as if {view.engine} "
            f"had sampled them, which is not exact in {view.dtype}; add old_logprobs: {{node: logprobs, role: "
            f"{view.node.role}}} and a correction"
        )

    def surrogate_formula(self, advantage: str) -> Formula:
        return Formula(symbol="L", expression=f"-{advantage} log p")

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        return -columns["advantages"] * logprobs, {}
