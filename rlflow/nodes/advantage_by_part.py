"""The advantage of a reward with several parts, each of which is compared within its group: GDPO.

Shapes: B rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from rlflow.batch import Rewards, RolloutAdvantages, Rollouts
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.advantages import Comparison, groups_of, repeat_for_tokens
from rlflow.nodes.alarms import REWARDS_ARE_EQUAL
from rlflow.nodes.base import Formula, Node, NodeView
from rlflow.nodes.expressions import times
from rlflow.nodes.reward import Reward, SummedRewards


@dataclass(frozen=True, kw_only=True)
class GdpoAdvantage(Comparison, Node, kind="gdpo_advantage", unit="batch", compares_groups=True):
    """The weighted sum of the parts of a reward, each compared within its group, normalized over the batch.

    A part whose values differ little then counts as much as the others, which it does not within the sum of rewards.
    A part that has nothing to say about a response, or failed, adds 0 to it.

    Source: GDPO (arXiv 2601.05242).
    """

    alarms = (REWARDS_ARE_EQUAL,)

    weights: Mapping[str, Annotated[float, Ge(-1e6), Le(1e6)]]
    """The weight of each part that counts, by its name in the node of the rewards, whose own weights do not count."""

    def check(self, connected: frozenset[str]) -> None:
        if not any(self.weights.values()):
            raise RecipeError("weights", "all are 0, and so is every advantage", fix="a part with weight 1")

    def check_graph(self, view: NodeView) -> None:
        origin = view.origin("rewards")
        if origin is None or not isinstance(origin.operation, Reward):
            fact = "the parts are not those of a node 'reward'"
            raise GraphError(f"{view.path}.rewards", fact, fix="rewards: the node of the reward functions")
        terms = origin.operation.terms
        if unknown := sorted(self.weights.keys() - terms.keys()):
            fact = f"graph.{origin.name} has no function '{unknown[0]}'"
            raise GraphError(f"{view.path}.weights.{unknown[0]}", fact, known=terms, fix="one of these")

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        parts = " + ".join(times(weight, f"c({name})") for name, weight in self.weights.items() if weight)
        expression = f"(x - mean of x) / (std of x + {self.epsilon:g}) over the batch"
        return Formula(symbol="A", expression=expression, where={"x": parts, "c(r)": self.expression("r")})

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        assert isinstance(rewards, SummedRewards), "see check_graph"
        group, total = groups_of(rollouts), np.zeros(len(rollouts))
        for name, weight in self.weights.items():
            total += weight * np.nan_to_num(self.compare(rewards.parts[name], group))
        total[np.isnan(rewards.values)] = np.nan
        known = total[~np.isnan(total)]
        if len(known) > 1:
            total = (total - known.mean()) / (known.std(ddof=1) + self.epsilon)
        return repeat_for_tokens(total, rollouts)
