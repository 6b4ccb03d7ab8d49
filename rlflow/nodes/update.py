"""Training a role's model on the step's data, one kind of node for each surrogate.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from rlflow.batch import Examples, Metrics
from rlflow.engines.base import Trains
from rlflow.nodes.base import Node
from rlflow.nodes.losses import LikelihoodLoss
from rlflow.nodes.policy_gradient import PolicyGradient
from rlflow.nodes.responses import means_over_responses
from rlflow.nodes.training import Aggregation, averaged, train

if TYPE_CHECKING:
    from torch import Tensor

    Columns = Mapping[str, Tensor]
    Loss = tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(PolicyGradient, Node, kind="policy_update", unit="batch"):
    """PPO's clipped surrogate: -min(r A, clip(r) A), r the ratio of a token's probability to the old one.

    Source: PPO (arXiv 1707.06347), equation 7; with a ``clip_eps_high`` DAPO (arXiv 2503.14476), equation 10.
    """

    clip_eps: Annotated[float, Gt(0)] = 0.2
    """How far the ratio counts below 1, and above it."""
    clip_eps_high: Annotated[float, Gt(0)] | None = None
    """Above it, where that is not as far."""

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        ratio = (logprobs - columns["old_logprobs"]).exp()
        return clipped(ratio, columns["advantages"], self.clip_eps, self.clip_eps_high)


@dataclass(frozen=True, kw_only=True)
class GspoUpdate(PolicyGradient, Node, kind="gspo_update", unit="batch"):
    """GSPO: the same with one ratio for a response, the geometric mean of its tokens' ratios.

    Source: arXiv 2507.18071, equations 5 to 7; the bounds are those of section 5.1.
    """

    aggregation: Aggregation = "sequence"
    clip_eps: Annotated[float, Gt(0)] = 3e-4
    clip_eps_high: Annotated[float, Gt(0)] | None = 4e-4
    """Where it is null: as below 1."""

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        ratio = means_over_responses(logprobs - columns["old_logprobs"], columns["rows"]).exp()
        return clipped(ratio, columns["advantages"], self.clip_eps, self.clip_eps_high)


@dataclass(frozen=True, kw_only=True)
class CispoUpdate(PolicyGradient, Node, kind="cispo_update", unit="batch"):
    """CISPO: -clip(r) A log p, where no gradient flows through the ratio r: every token has one, none is dropped.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, which has no lower bound.
    """

    clip_eps_high: Annotated[float, Gt(0)] = 4.0
    """How far the ratio counts above 1."""

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        ratio = (logprobs.detach() - columns["old_logprobs"]).exp()
        bounded = ratio.clamp(max=1 + self.clip_eps_high)
        return -bounded * columns["advantages"] * logprobs, {"clip_fraction": (bounded < ratio).float()}


@dataclass(frozen=True, kw_only=True)
class ReinforceUpdate(PolicyGradient, Node, kind="reinforce_update", unit="batch"):
    """REINFORCE: -A log p. For one optimizer step on what the policy itself has written: there is no ratio."""

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        return -columns["advantages"] * logprobs, {}


@dataclass(frozen=True, kw_only=True)
class SftUpdate(Node, kind="sft_update", unit="batch"):
    """Supervised training on the responses of the data set."""

    num_minibatches: Annotated[int, Ge(1)] = 1

    def run(self, engine: Trains, examples: Examples) -> Metrics:
        steps = train(engine, examples, {}, LikelihoodLoss(), num_minibatches=self.num_minibatches)
        return Metrics(values=averaged(steps))


def clipped(ratio: "Tensor", advantages: "Tensor", eps: float, eps_high: float | None) -> "Loss":
    """The smaller of what a ratio and a clipped one give, and the metric ``clip_fraction``."""
    free = ratio * advantages
    bounded = ratio.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high)) * advantages
    return -free.minimum(bounded), {"clip_fraction": (free > bounded).float()}
