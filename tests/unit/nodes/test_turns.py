"""Rewards of single turns, by hand: where they are given, and the advantages that follow from them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlflow.batch import Divergences, Packed, Rewards, ValueEstimates
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.critic import GaeAdvantage
from rlflow.nodes.reward import Reward
from rlflow.nodes.reward_shaping import KlPenalty
from rlflow.nodes.turns import TurnAdvantage
from rlflow.rewards.callables import RewardTerm
from tests.helpers import conversations, rollouts, sequences

# Two prompts with two conversations each. The first has two turns of 2 and 1 tokens, with 3 of the environment between.
TURNS = [[[2, 3, 1], [1, 1, 2]], [[4], [1, 2, 2, 1, 3]]]
TURN_REWARDS = [[1.0, 2.0], [0.0, 4.0], [5.0], [1.0, 0.0, 3.0]]
GIVEN = conversations(TURNS, TURN_REWARDS)
REWARDS = Rewards(values=np.array([3, 4, 5, 4], np.float32), turns=GIVEN.turn_rewards)


def rows(column: Packed) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


def test_each_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    """From turn 0 on the rewards of the first group are 3 and 4, and from turn 1 on 2 and 4."""
    out = TurnAdvantage(normalize=False).run(GIVEN, REWARDS)
    assert rows(out.values) == [
        [-0.5, -0.5, 0, 0, 0, -1],
        [0.5, 0, 1, 1],
        [0.5] * 4,
        # Nobody else has a second or a third turn.
        [-0.5] + [0] * 8,
    ]


def test_deviations_and_discounts_are_those_of_a_turn() -> None:
    """Discounted, 1 + 2 / 2 and 0 + 4 / 2 are equal; 2 and 4 have the standard deviation sqrt(2)."""
    out = TurnAdvantage(gamma=0.5, epsilon=1e-12).run(GIVEN, REWARDS)
    assert out.values[0].tolist() == pytest.approx([0] * 5 + [-1 / np.sqrt(2)])
    # 5 and 1 + 0 / 2 + 3 / 4 differ by 3.25, and their standard deviation is 3.25 / sqrt(2).
    assert out.values[3].tolist() == pytest.approx([-1 / np.sqrt(2)] + [0] * 8)


def test_excluded_conversations_do_not_count() -> None:
    rewards = Rewards(values=np.array([np.nan, 4, 5, 4], np.float32), turns=GIVEN.turn_rewards)
    out = TurnAdvantage(normalize=False).run(GIVEN, rewards)
    assert out.excluded.tolist() == [True, False, False, False]
    assert rows(out.values)[1] == [0] * 4


def test_with_one_turn_it_is_the_advantage_of_the_group() -> None:
    given = rollouts(sequences([2, 2], [[3, 1, 2], [2, 2]]))
    rewards = Rewards(values=np.array([1, 0, 0.5, np.nan, 2], np.float32))
    ours, groups = TurnAdvantage().run(given, rewards), GroupAdvantage().run(given, rewards)
    assert ours.values.values == pytest.approx(groups.values.values, nan_ok=True)
    assert (ours.is_included == groups.is_included).all()


def test_in_gae_the_reward_of_a_turn_comes_with_its_last_token() -> None:
    """With lam 1 and gamma 1 the return of a token is what comes from it on."""
    zeros = ValueEstimates(values=GIVEN.response_ids.like(np.zeros(23, np.float32)))
    out = GaeAdvantage(lam=1.0, normalize=False).run(GIVEN, REWARDS, zeros)
    assert rows(out.returns) == [
        [3, 3, 0, 0, 0, 2],
        [4, 0, 4, 4],
        [5] * 4,
        [4, 0, 0, 3, 3, 0, 3, 3, 3],
    ]
    # The errors of the first conversation's tokens are 0, 1 and 2, and half of the next advantage is added to each.
    half = GaeAdvantage(lam=0.5, normalize=False).run(GIVEN, REWARDS, zeros)
    assert half.values[0].tolist() == [1, 2, 0, 0, 0, 2]


def test_a_penalty_comes_with_the_last_turn() -> None:
    kl = Divergences(values=np.array([2, 0, 0, 4], np.float32))
    out = KlPenalty(kl_coef=0.5).run(REWARDS, kl)
    assert out.values.tolist() == [2, 4, 5, 2]
    assert out.turns is not None
    assert rows(out.turns) == [[1, 1], [0, 4], [5], [1, 0, 1]]
    assert rows(GIVEN.turn_rewards) == TURN_REWARDS


def give(*terms: tuple[str, float]) -> Rewards:
    """Return the rewards of a sum of these functions and weights. The answers of all rows are 1, as are all texts."""
    data = tuple({"answer": "1", "environment_reward": sum(turns)} for turns in TURN_REWARDS)
    functions = {name: RewardTerm(weight=weight) for name, weight in terms}
    return Reward(functions=functions).run(replace(GIVEN, rows=data))


def test_other_functions_add_to_the_last_turn() -> None:
    both = give(("environment", 2.0), ("exact", 0.5))
    assert both.values.tolist() == [6.5, 8.5, 10.5, 8.5]
    assert both.turns is not None
    assert rows(both.turns) == [[2, 4.5], [0, 8.5], [10.5], [2, 0, 6.5]]
    assert give(("exact", 1.0)).turns is None
    assert json.loads(json.dumps(both.metrics()))["mean"] == 8.5
