"""Scores of a reward model on one scale, and the gate that compares them with true rewards."""

from math import isnan

import numpy as np
import pytest

from rlflow.batch import Rewards
from rlflow.errors import RecipeError
from rlflow.nodes.reward_gate import (
    CheckedRewards,
    RecentGroups,
    RewardGate,
    ScaledReward,
    ScoreMoments,
    group_accuracies,
)
from tests.helpers import rollouts, sequences

NAN = np.nan
SIZES = [4, 1, 6, 3]
GIVEN = rollouts(sequences([2] * 4, [[3] * size for size in SIZES]))
GROUP = GIVEN.keys[:, 1]


def rewards(values: list[float]) -> Rewards:
    return Rewards(values=np.array(values, np.float32))


def test_scores_are_in_deviations_from_the_mean_of_all_so_far() -> None:
    draw, state, seen = np.random.default_rng(0), ScoreMoments(), np.zeros(0)
    node = ScaledReward(clip=1.5, missing_end=0.25)
    GIVEN.finished[[0, 5]] = False
    for scale in (1, 20, 3):
        scores = draw.normal(scale, scale, len(GIVEN)).astype(np.float32)
        scores[3] = NAN
        seen = np.concatenate([seen, np.delete(scores, 3).astype(np.float64)])
        expected = ((scores - seen.mean()) / (seen.std() + 1e-6)).clip(-1.5, 1.5)
        expected[[0, 5]] -= 0.25
        np.testing.assert_allclose(node.run(GIVEN, rewards(scores.tolist()), state).values, expected, rtol=1e-5)
        restored = ScoreMoments()
        restored.load_state_dict(state.state_dict())
        state = restored


def test_the_accuracy_in_groups_against_a_plain_loop() -> None:
    draw = np.random.default_rng(0)
    for _ in range(30):
        truth, scores = draw.integers(0, 3, (2, len(GIVEN))).astype(float)
        truth[draw.integers(len(GIVEN))] = scores[draw.integers(len(GIVEN))] = NAN
        expected = []
        for prompt in range(len(SIZES)):
            rows = [row for row in np.flatnonzero(prompt == GROUP) if not isnan(truth[row] + scores[row])]
            right = [
                1.0 if scores[a] > scores[b] else 0.5 if scores[a] == scores[b] else 0.0
                for a in rows
                for b in rows
                if truth[a] > truth[b]
            ]
            expected += [sum(right) / len(right)] if right else []
        assert group_accuracies(GROUP, scores, truth) == pytest.approx(expected)


def test_scores_that_rank_like_chance_end_the_run() -> None:
    """Two groups count, because their true rewards differ. The last three decide."""
    truth, gate, state = rewards([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]), RewardGate(groups=3), RecentGroups()
    good, wrong = rewards([0, 1, 2, 3, *range(10)]), rewards([3, 2, 1, 0, *range(9, -1, -1)])
    passed = gate.run(GIVEN, wrong, truth, state)
    assert isinstance(passed, CheckedRewards)
    assert passed.accuracy == 0, "two groups are too few to decide"
    assert passed.values.tolist() == wrong.values.tolist()
    with pytest.raises(RecipeError, match=r"they order 67% \(standard error 27\.2%\) of .* in 3 groups as"):
        gate.run(GIVEN, good, truth, state)
    assert gate.run(GIVEN, good, truth, state).metrics()["accuracy"] == 1


def test_a_true_reward_that_never_differs_decides_nothing() -> None:
    gate, state = RewardGate(groups=1), RecentGroups()
    output = gate.run(GIVEN, rewards(list(range(len(GIVEN)))), rewards([1.0] * len(GIVEN)), state)
    assert "accuracy" not in output.metrics()


@pytest.mark.parametrize(("later", "falls"), [(0.4, False), (0.25, True)])
def test_a_run_whose_true_rewards_fall_ends(later: float, falls: bool) -> None:
    """At first 100 of 200 responses, each to a prompt of its own, are right, then 80 or 50.

    With 40 groups for the accuracy, 200 count for the true reward. A mean of 200 ones and zeros has a standard error of
    at most 0.035, and the difference of two of 0.05.
    """
    alone = rollouts(sequences([2] * 200, [[3]] * 200))
    scores, state = rewards([0.0] * 200), RecentGroups()
    right = [1.0] * 100 + [0.0] * 100
    fewer = [1.0] * round(200 * later) + [0.0] * (200 - round(200 * later))
    RewardGate(groups=40).run(alone, scores, rewards(right), state)
    restored = RecentGroups()
    restored.load_state_dict(state.state_dict())
    RewardGate(groups=40, may_fall=True).run(alone, scores, rewards(fewer), state)
    if falls:
        with pytest.raises(RecipeError, match=r"'truth' has fallen from 0\.5 to 0\.25 while"):
            RewardGate(groups=40).run(alone, scores, rewards(fewer), restored)
    else:
        RewardGate(groups=40).run(alone, scores, rewards(fewer), restored)
