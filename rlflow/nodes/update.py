"""Training a role's model on the step's data, one kind of node for each surrogate.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from rlflow.batch import Examples, Metrics
from rlflow.engines.base import Trains
from rlflow.nodes.base import Node, Setting
from rlflow.nodes.formula import Formula
from rlflow.nodes.losses import LikelihoodLoss
from rlflow.nodes.policy_gradient import PolicyGradient
from rlflow.nodes.ratio import ratio
from rlflow.nodes.responses import means_over_responses
from rlflow.nodes.training import Aggregation, Weighting, averaged, train

if TYPE_CHECKING:
    from torch import Tensor

    Columns = Mapping[str, Tensor]
    Loss = tuple[Tensor, Mapping[str, Tensor]]


_CLIPPING = {
    "clip_ratio": "clip_eps",
    "clip_ratio_low": "clip_eps",
    "clip_ratio_high": "clip_eps_high",
    "epsilon": "clip_eps",
    "epsilon_high": "clip_eps_high",
}
_DUAL = {"clip_ratio_c": "dual_clip", "delta": "dual_clip"}


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(PolicyGradient, Node, kind="policy_update", unit="batch"):
    """PPO's clipped surrogate: -min(r A, clip(r) A), r the ratio of a token's probability to the old one.

    Source: PPO (arXiv 1707.06347), equation 7; with a ``clip_eps_high`` DAPO (arXiv 2503.14476), equation 10.
    """

    called_elsewhere: ClassVar[Mapping[str, str]] = {**PolicyGradient.called_elsewhere, **_CLIPPING, **_DUAL}

    clip_eps: Annotated[float, Gt(0)] = 0.2
    """How far the ratio counts below 1, and above it."""
    clip_eps_high: Annotated[float, Gt(0)] | None = None
    """Above it, where that is not as far."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        return Formula(symbol="L", expression=term, where={"w": "p / p_old"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        of_tokens = ratio(logprobs - columns["old_logprobs"])
        return clipped(of_tokens, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class GspoUpdate(PolicyGradient, Node, kind="gspo_update", unit="batch"):
    """GSPO: the same with one ratio for a response, the geometric mean of its tokens' ratios.

    Source: arXiv 2507.18071, equations 5 to 7; the bounds are those of section 5.1.
    """

    called_elsewhere: ClassVar[Mapping[str, str]] = {**PolicyGradient.called_elsewhere, **_CLIPPING, **_DUAL}

    aggregation: Aggregation = "sequence"
    clip_eps: Annotated[float, Gt(0)] = 3e-4
    clip_eps_high: Annotated[float, Gt(0)] | None = 4e-4
    """Where it is null: as below 1."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """The largest ratio that counts where the advantage is negative. Null: any."""

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, self.dual_clip)
        return Formula(symbol="L", expression=term, where={"w": "exp(mean over the response of log(p / p_old))"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        of_responses = ratio(means_over_responses(logprobs - columns["old_logprobs"], columns["rows"]))
        return clipped(of_responses, columns["advantages"], self.clip_eps, self.clip_eps_high, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class CispoUpdate(PolicyGradient, Node, kind="cispo_update", unit="batch"):
    """CISPO: -clip(r) A log p, where no gradient flows through the ratio r: every token has one, none is dropped.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, whose experiments have no lower bound.
    """

    called_elsewhere: ClassVar[Mapping[str, str]] = {**PolicyGradient.called_elsewhere, **_CLIPPING}

    clip_eps: Annotated[float, Gt(0), Lt(1)] | None = None
    """How far the ratio counts below 1. Null: without a bound."""

    clip_eps_high: Annotated[float, Gt(0)] = 4.0
    """How far the ratio counts above 1."""

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
    """REINFORCE: -A log p. For one optimizer step on what the policy itself has written: there is no ratio."""

    def cautions(self, setting: Setting) -> Iterator[str]:
        yield from super().cautions(setting)
        for option in ("num_minibatches", "num_epochs"):
            if (count := getattr(self, option)) > 1:
                yield (
                    f"{option}: is {count}, and this loss has no ratio: from the second optimizer step on it trains on "
                    "responses of an older policy as if they were its own; use 1, or policy_update"
                )

    def mismatch_cautions(self, setting: Setting) -> Iterator[str]:
        yield (
            f"correction: is missing, so responses of {' and '.join(setting.samplers)} count as if {setting.engine} "
            f"had sampled them, which is not exact in {setting.dtype}; add old_logprobs: {{node: logprobs, role: "
            f"{setting.role}}} and a correction"
        )

    def surrogate_formula(self, advantage: str) -> Formula:
        return Formula(symbol="L", expression=f"-{advantage} log p")

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        return -columns["advantages"] * logprobs, {}


@dataclass(frozen=True, kw_only=True)
class SftUpdate(Node, kind="sft_update", unit="batch"):
    """Supervised training on the responses of the data set."""

    num_minibatches: Annotated[int, Ge(1)] = 1

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="L", expression=f"{Weighting().expression('responses')} of [-log p]")

    def run(self, engine: Trains, examples: Examples) -> Metrics:
        steps = train(engine, examples, {}, LikelihoodLoss(), num_minibatches=self.num_minibatches)
        return Metrics(values=averaged(steps))


def clipped(
    free: "Tensor", advantages: "Tensor", eps: float, eps_high: float | None, dual_clip: float | None = None
) -> "Loss":
    """Return the loss [T] of the smaller of what a ratio [T] and a clipped one give, and the shares that are clipped.

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
    """Return the loss of ``clipped`` for people, w being the ratio."""
    high = eps if eps_high is None else eps_high
    term = f"-min(w {advantage}, clip(w, {1 - eps:g}, {1 + high:g}) {advantage})"
    return term if dual_clip is None else f"min({term}, {dual_clip:g} |{advantage}|)"


def clip_fractions(is_clipped: "Tensor", advantages: "Tensor") -> "Mapping[str, Tensor]":
    """Return the metrics of clipping, from where tokens are clipped [T]: the share of all tokens, of those with a
    positive advantage, and of those with a negative one."""
    share = is_clipped.to(advantages.dtype)
    return {
        "clip_fraction": share,
        "clip_fraction_positive": share.masked_fill(advantages <= 0, nan),
        "clip_fraction_negative": share.masked_fill(advantages >= 0, nan),
    }
