"""The logprobs before a step, without those that the step's update computes anyway."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rlflow.batch import Advantages, Logprobs, Packed, Rollouts
from rlflow.engines.base import Scores
from rlflow.nodes.base import GraphNode, Node, NodeView
from rlflow.nodes.minibatches import first_minibatch
from rlflow.nodes.scoring import ScoreLogprobs
from rlflow.schema import Count


@dataclass(frozen=True, kw_only=True)
class LaterLogprobs(Node, kind="later_logprobs", unit="batch", is_in_recipes=False):
    """The logprobs under the role's model of the responses that are trained on after its first optimizer step.

    All other rows are empty. The update computes those of its first minibatch itself, with the same weights.
    """

    # The update checks that they belong to the rollouts.
    other_responses: ClassVar[frozenset[str]] = frozenset({"advantages"})

    num_parts: Count
    """The number of minibatches of the update."""

    @property
    def sample_share(self) -> float:
        return 1 - 1 / self.num_parts

    def run(self, engine: Scores, rollouts: Rollouts, advantages: Advantages) -> Logprobs:
        included = np.flatnonzero(advantages.is_included)
        first = first_minibatch(rollouts.as_sequences().take(included), self.num_parts)
        later = np.delete(included, first)
        values = Packed.from_rows([], np.float32)
        if len(later):
            values = engine.logprobs(rollouts.take(later), rollouts.temperature).values
        return Logprobs(values=values.spread(later, len(rollouts)))


def score_later_minibatches(view: NodeView, num_minibatches: int) -> Mapping[str, GraphNode]:
    """Return the node that replaces the ``old_logprobs`` of an update, or nothing where another node needs them all.

    The update must begin with the weights of the step, which no other node may train.
    """
    old, update = view.origin("old_logprobs"), view.node
    if old is None:
        return {}
    readers = [name for name, node in view.nodes.items() for origin in node.inputs.values() if origin == old.name]
    trains = [name for name, node in view.nodes.items() if node.role == old.role and "Trains" in node.capabilities]
    is_same = type(old.operation) is ScoreLogprobs and old.inputs["rollouts"] == update.inputs["rollouts"]
    if not is_same or not readers == trains == [update.name]:
        return {}
    inputs = {name: update.inputs[name] for name in ("rollouts", "advantages")}
    return {old.name: replace(old, operation=LaterLogprobs(num_parts=num_minibatches), inputs=inputs)}
