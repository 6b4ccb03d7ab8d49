"""Training of a critic on the returns of the step's rollouts.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt

from rlflow.batch import Metrics, Rollouts, ValueEstimates
from rlflow.engines.base import TrainsValues
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.gae import GaeAdvantages
from rlflow.nodes.minibatches import Weighting, mean_metrics, train

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Half the squared distance to the return, with the value clipped.

    A value that moved further than ``clip_eps`` from its value before the step counts as if it had stopped there, where
    that is the larger loss: such a token has no gradient.

    Source: Engstrom et al. (arXiv 2005.12729), section 3, after openai/baselines. Columns: ``old_values``, ``returns``.
    """

    clip_eps: float | None
    temperature: float = 1.0
    """The temperature of the logits, which a value head does not have."""

    def __call__(self, values: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss [T], and the share of clipped tokens."""
        old, returns = columns["old_values"], columns["returns"]
        free = (values - returns) ** 2 / 2
        if self.clip_eps is None:
            return free, {}
        moved = values - old
        bounded = (old + moved.clamp(-self.clip_eps, self.clip_eps) - returns) ** 2 / 2
        clipped = (moved.abs() > self.clip_eps) & (bounded > free)
        return bounded.where(clipped, free), {"clip_fraction": clipped.float()}


@dataclass(frozen=True, kw_only=True)
class ValueUpdate(Node, kind="value_update", unit="batch"):
    """Train the critic on the returns. Every token has the same weight. Excluded rollouts are in no minibatch."""

    clip_eps: Annotated[float, Gt(0)] | None = 0.2
    """The distance from the value before the step at which a value is clipped. Null: no clipping."""
    num_minibatches: Annotated[int, Ge(1)] = 1
    """The number of optimizer steps that the rollouts are divided among. With the policy's number, the minibatches are
    the same."""
    num_epochs: Annotated[int, Ge(1)] = 1

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        term, old = "(v - R)^2 / 2", symbols["values"]
        if self.clip_eps is not None:
            term = f"max({term}, (clip(v, {old} - {self.clip_eps:g}, {old} + {self.clip_eps:g}) - R)^2 / 2)"
        where = {"v": "the critic's value", "R": f"x + {old}, the advantage before it is normalised plus {old}"}
        return Formula(symbol="L", expression=f"{Weighting().expression('responses')} of [{term}]", where=where)

    def run(
        self, engine: TrainsValues, rollouts: Rollouts, values: ValueEstimates, advantages: GaeAdvantages
    ) -> Metrics:
        if not advantages.is_included.all():
            known = np.flatnonzero(advantages.is_included)
            rollouts, values, advantages = rollouts.take(known), values.take(known), advantages.take(known)
        steps = train(
            engine,
            rollouts,
            {"old_values": values.values, "returns": advantages.returns},
            ValueLoss(clip_eps=self.clip_eps),
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
        )
        return Metrics(values=mean_metrics(steps))
