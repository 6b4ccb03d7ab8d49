"""Advantages worked out by hand, and compared with plain loops in float64 on ragged random groups."""

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Advantages, Batch, Logprobs, Rewards, RolloutAdvantages
from rlflow.errors import EngineError, GraphError
from rlflow.nodes.advantages import (
    BatchAdvantage,
    GreedyAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MaxRlAdvantage,
    TeacherAdvantage,
    TokenAdvantage,
)
from rlflow.nodes.base import KINDS
from tests.helpers import rollouts, sequences

GROUPS = rollouts(sequences([2, 2, 2], [[1, 1, 1, 1], [1, 1], [1]]))
REWARDS = Rewards(values=np.array([1, 0, 0, 1, 3, 3, 5], np.float32))

DRAW = np.random.default_rng(0)
SIZES = [4, 1, 7, 3, 2]
LENGTHS = [DRAW.integers(1, 9, size).tolist() for size in SIZES]
# The order is random, because rollouts of a prompt need not be neighbours.
SHUFFLED = DRAW.permutation(sum(SIZES))
RAGGED = rollouts(sequences([2] * len(SIZES), LENGTHS)).take(SHUFFLED)
RANDOM = Rewards(values=DRAW.normal(0.3, 2, len(RAGGED)).astype(np.float32))


def of_each(advantages: Advantages) -> list[float]:
    """Return the number of each rollout, which all of its tokens have."""
    assert isinstance(advantages, RolloutAdvantages)
    rows = [advantages.values[row] for row in range(len(advantages))]
    assert all((row == row[0]).all() for row in rows)
    return [float(row[0]) for row in rows]


def test_by_hand() -> None:
    """The first group has mean 1/2 and standard deviation sqrt(4 * 1/4 / 3); the others do not differ in themselves."""
    high = 0.5 / (3**-0.5 + 1e-4)
    values = of_each(GroupAdvantage().run(GROUPS, REWARDS))
    assert values == pytest.approx([high, -high, -high, high, 0, 0, 0], abs=1e-6)


def test_groups_with_equal_rewards_bring_no_gradient() -> None:
    """Three of seven rollouts are in groups whose rewards do not differ, and a tenth is no exact binary fraction."""
    rewards = Rewards(values=np.array([1, 0, 0, 1, 0.1, 0.1, 5], np.float32))
    assert GroupAdvantage().run(GROUPS, rewards).metrics() == {"zero": pytest.approx(3 / 7)}
    unknown = Rewards(values=np.array([1, 0, 0, 1, np.nan, np.nan, 5], np.float32))
    assert GroupAdvantage().run(GROUPS, unknown).metrics() == {"zero": pytest.approx(1 / 5)}
    assert rewards.metrics()["std"] == pytest.approx(np.std([1, 0, 0, 1, 0.1, 0.1, 5]))


def test_without_the_division() -> None:
    values = of_each(GroupAdvantage(normalize=False).run(GROUPS, REWARDS))
    assert values == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, 0, 0])


def test_leave_one_out_by_hand() -> None:
    """The others of a winner in the first group have 1/3 in the mean; a rollout alone has none."""
    values = of_each(LeaveOneOutAdvantage().run(GROUPS, REWARDS))
    assert values == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0])


def test_maxrl_by_hand() -> None:
    """A rare success counts more; a group without one brings no gradient, and a missing reward counts nowhere."""
    rewards = Rewards(values=np.array([1, 0, 0, 0, 0, 0, np.nan], np.float32))
    advantages = MaxRlAdvantage().run(GROUPS, rewards)
    assert [advantages.values[row][0] for row in range(6)] == [3, -1, -1, -1, 0, 0]
    assert advantages.is_included.tolist() == [True] * 6 + [False]
    with pytest.raises(EngineError, match="rewards: maxrl_advantage expected 0 or more, got -1"):
        MaxRlAdvantage().run(GROUPS, Rewards(values=-rewards.values))


def groups() -> Iterator[list[int]]:
    """Yield the rows of each group."""
    for prompt in range(len(SIZES)):
        yield [row for row in range(len(RAGGED)) if RAGGED.keys[row, 1] == prompt]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain_group(normalize: bool) -> list[float]:
    values = [0.0] * len(RAGGED)
    for rows in groups():
        rewards = [float(RANDOM.values[row]) for row in rows]
        middle = mean(rewards)
        deviation = sqrt(sum((reward - middle) ** 2 for reward in rewards) / max(len(rows) - 1, 1))
        for row, reward in zip(rows, rewards, strict=True):
            values[row] = (reward - middle) / (deviation + 1e-4 if normalize else 1)
    return values


def plain_leave_one_out() -> list[float]:
    values = [0.0] * len(RAGGED)
    for rows in groups():
        for row in rows:
            others = [float(RANDOM.values[other]) for other in rows if other != row]
            values[row] = float(RANDOM.values[row]) - mean(others) if others else 0.0
    return values


def normalised(tokens: list[list[float]]) -> list[list[float]]:
    flat = [value for row in tokens for value in row]
    deviation = sqrt(mean([(value - mean(flat)) ** 2 for value in flat]))
    return [[(value - mean(flat)) / (deviation + 1e-8) for value in row] for row in tokens]


def plain_batch() -> list[float]:
    centred = plain_group(normalize=False)
    tokens = [[value] * length for value, length in zip(centred, RAGGED.response_ids.lengths, strict=True)]
    return [row[0] for row in normalised(tokens)]


@pytest.mark.parametrize(
    ("node", "plain"),
    [
        (GroupAdvantage(), lambda: plain_group(True)),
        (GroupAdvantage(normalize=False), lambda: plain_group(False)),
        (LeaveOneOutAdvantage(), plain_leave_one_out),
        (BatchAdvantage(), plain_batch),
    ],
)
def test_a_plain_loop_gives_the_same(node: Any, plain: Callable[[], list[float]]) -> None:
    assert of_each(node.run(RAGGED, RANDOM)) == pytest.approx(plain(), abs=1e-6)


def test_the_greedy_response_is_the_baseline_of_its_prompt() -> None:
    """The order of the responses does not matter."""
    order = np.array([3, 0, 4, 2, 1])
    greedy = rollouts(sequences([2] * len(SIZES), [[3]] * len(SIZES))).take(order)
    rewards = Rewards(values=order.astype(np.float32))
    values = of_each(GreedyAdvantage().run(RAGGED, RANDOM, greedy, rewards))
    expected = [float(RANDOM.values[row]) - RAGGED.keys[row, 1] for row in range(len(RAGGED))]
    assert values == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_token_and_those_after_it(estimator: Any) -> None:
    response = RAGGED.response_ids
    own, reference = (
        Logprobs(values=response.like(DRAW.normal(-2, 0.5, len(response.values)).astype(np.float32))) for _ in range(2)
    )
    tokens: list[list[float]] = []
    for row in range(len(RAGGED)):
        values = []
        for at in range(len(response[row])):
            ahead = 0.0
            for later in range(at, len(response[row])):
                difference = float(own.values[row][later]) - float(reference.values[row][later])
                ahead += {
                    "k1": difference,
                    "k2": difference**2 / 2,
                    "k3": float(np.exp(-difference)) - 1 + difference,
                }[estimator]
            values.append(float(RANDOM.values[row]) - 0.2 * ahead)
        tokens.append(values)
    node = TokenAdvantage(kl_coef=0.2, kl_estimator=estimator)
    ours = node.run(RAGGED, RANDOM, reference, old_logprobs=own).values
    for row, expected in enumerate(normalised(tokens)):
        assert ours[row] == pytest.approx(expected, abs=1e-6)


def test_token_advantages_without_a_reference_are_normalized_rewards() -> None:
    """By hand: the tokens 1, 0, 0, 0 have the mean 1/4 and the variance 3/16."""
    given = rollouts(sequences([2, 2], [[1], [3]]))
    ours = TokenAdvantage().run(given, Rewards(values=np.array([1, 0], np.float32))).values
    assert ours[0] == pytest.approx([0.75 / sqrt(3 / 16)], abs=1e-6)
    assert ours[1] == pytest.approx([-0.25 / sqrt(3 / 16)] * 3, abs=1e-6)
    with pytest.raises(GraphError, match=r"^kl_coef: 0\.1 needs the reference's logprobs"):
        TokenAdvantage(kl_coef=0.1).check(frozenset({"rollouts", "rewards"}))


def test_rewards_that_are_all_alike_teach_nothing() -> None:
    alike = Rewards(values=np.full(len(RAGGED), 0.7, np.float32))
    for node in (GroupAdvantage(), LeaveOneOutAdvantage(), BatchAdvantage()):
        assert of_each(node.run(RAGGED, alike)) == pytest.approx([0] * len(RAGGED), abs=1e-6)
    assert np.abs(TokenAdvantage().run(RAGGED, alike).values.values).max() < 1e-6


ESTIMATORS = [
    GroupAdvantage(),
    GroupAdvantage(normalize=False),
    LeaveOneOutAdvantage(),
    MaxRlAdvantage(),
    GreedyAdvantage(),
    BatchAdvantage(),
    TokenAdvantage(kl_coef=0.1),
]


def test_all_estimators_are_tested_for_rewards_that_are_missing() -> None:
    kinds = {kind for kind in KINDS.values() if kind.__module__ == GroupAdvantage.__module__}
    assert {type(node) for node in ESTIMATORS} == kinds - {TeacherAdvantage}, "it reads no rewards"


@pytest.mark.parametrize("node", ESTIMATORS)
def test_rollouts_without_a_reward_change_nothing(node: Any) -> None:
    """A whole group has none, and of the others some."""
    missing = (RAGGED.keys[:, 1] == 3) | (np.arange(len(RAGGED)) % 5 == 0)
    kept, values = np.flatnonzero(~missing), abs(RANDOM.values)
    of_rollouts = {
        "rollouts": RAGGED,
        "rewards": Rewards(values=values),
        "reference": Logprobs(values=RAGGED.response_ids.like(DRAW.normal(-1, 0.5, len(RAGGED.logprobs.values)))),
    }
    of_prompts = {
        "greedy": rollouts(sequences([2] * len(SIZES), [[3]] * len(SIZES))),
        "greedy_rewards": Rewards(values=DRAW.normal(0.3, 2, len(SIZES)).astype(np.float32)),
    }
    required = {item.name for item in node.inputs() if item.required}

    def run(of_rollouts: Mapping[str, Batch]) -> Advantages:
        given = {**of_rollouts, **of_prompts}
        advantages: Advantages = node.run(**{name: given[name] for name in required})
        return advantages

    expected = run({name: batch.take(kept) for name, batch in of_rollouts.items()})
    without = np.where(missing, np.nan, values).astype(np.float32)
    ours = run({**of_rollouts, "rewards": Rewards(values=without)})
    assert (ours.is_included == ~missing).all()
    assert expected.is_included.all()
    assert ours.take(kept).values.values == pytest.approx(expected.values.values, abs=1e-6)


def test_the_others_of_a_group_by_hand() -> None:
    """The first group keeps 1, 0 and 4, with mean 5/3 and deviation sqrt(13/3), and the second one a single reward."""
    given = Rewards(values=np.array([1, np.nan, 0, 4, np.nan, 3, np.nan], np.float32))
    values = of_each(GroupAdvantage().run(GROUPS, given).take(np.array([0, 2, 3, 5])))
    expected = [(reward - 5 / 3) / ((13 / 3) ** 0.5 + 1e-4) for reward in (1, 0, 4)]
    assert values == pytest.approx([*expected, 0], abs=1e-6)


def test_where_the_greedy_response_has_no_reward_its_prompt_is_excluded() -> None:
    greedy = rollouts(sequences([2] * len(SIZES), [[3]] * len(SIZES)))
    rewards = Rewards(values=np.array([0, np.nan, 0, 0, 0], np.float32))
    assert (GreedyAdvantage().run(RAGGED, RANDOM, greedy, rewards).is_included == (RAGGED.keys[:, 1] != 1)).all()
