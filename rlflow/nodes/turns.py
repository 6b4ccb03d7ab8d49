"""Advantages of single turns of a conversation with an environment.

Shapes: B conversations, T turns of all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from rlflow.batch import Packed, Rewards, Rollouts, TokenAdvantages
from rlflow.nodes.advantages import Comparison, groups_of
from rlflow.nodes.alarms import REWARDS_ARE_EQUAL
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.critic import discounted_sums


@dataclass(frozen=True, kw_only=True)
class TurnAdvantage(Comparison, Node, kind="turn_advantage", unit="group", reads_tokens=True):
    """The rewards from a turn on, compared with those of the group's other conversations from their same turn on.

    Each token of a turn has the turn's advantage. The mean and the standard deviation of turn k are those of the
    conversations that have one, so that a turn that only one conversation reached has no advantage. With one turn it is
    ``group_advantage``.

    Source: the return to go with a baseline, as in Sutton and Barto, Reinforcement Learning (2018), section 13.4; the
    group's mean as that baseline: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """

    alarms = (REWARDS_ARE_EQUAL,)

    gamma: Annotated[float, Ge(0.001), Le(1)] = 1.0
    """The discount of a reward for each turn before it."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(distance to k) "
        total = f"sum over the turns from k on of {discount}{symbols['rewards']}"
        where = {"k": "the turn of the token", "G_k": total}
        return Formula(symbol="A", expression=self.expression("G_k"), where=where)

    def run(self, rollouts: Rollouts, rewards: Rewards) -> TokenAdvantages:
        turns = rollouts.turn_lengths
        is_excluded = np.repeat(np.isnan(rewards.values), turns.lengths)
        later = np.where(is_excluded, np.nan, discounted_sums(_turn_rewards(rewards, turns), self.gamma))
        place = np.arange(len(later)) - np.repeat(turns.offsets[:-1], turns.lengths)
        _, group = np.unique(
            np.column_stack([np.repeat(groups_of(rollouts), turns.lengths), place]), axis=0, return_inverse=True
        )
        values = np.zeros(int(rollouts.response_ids.offsets[-1]), np.float32)
        values[rollouts.own_tokens().values] = np.repeat(self.compare(later, group), turns.values)
        return TokenAdvantages(values=rollouts.response_ids.like(values), excluded=np.isnan(rewards.values))


def _turn_rewards(rewards: Rewards, turns: Packed) -> Packed:
    """Return the reward of each of the ``turns``: those of the environment, or one with the last turn."""
    if rewards.turns is not None:
        assert np.array_equal(rewards.turns.lengths, turns.lengths), "each turn has a reward"
        return rewards.turns
    values, has_turns = np.zeros(len(turns.values)), turns.lengths > 0
    values[turns.offsets[1:][has_turns] - 1] = rewards.values[has_turns]
    return turns.like(values)
