"""The rows that a curriculum draws, and what it learns from rewards."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from rlflow.batch import Rewards
from rlflow.errors import RecipeError
from rlflow.nodes.curriculum import Curriculum, Difficulty, JudgedPrompts
from tests.helpers import rollouts, sequences

NAN = np.nan
LEVELS = ["easy", "hard"] * 50


def order(*, seed: int = 0, **options: float) -> Difficulty:
    return Curriculum(by="level", **options).new_order(LEVELS, seed)  # type: ignore[arg-type]


def test_success_is_the_mean_of_rewards_within_0_and_1() -> None:
    values = np.array([[0, 1, 1], [-1, -1, 2], [NAN, 1, 0], [NAN, NAN, NAN], [1, 1, 1]], np.float32).ravel()
    given = rollouts(sequences([2] * 5, [[1] * 3] * 5))
    judged = Curriculum().run(given, Rewards(values=values))
    assert isinstance(judged, JudgedPrompts)
    np.testing.assert_allclose(judged.success, [2 / 3, 1 / 3, 1 / 2, NAN, 1])
    assert judged.chosen.tolist() == [True, True, True, False, True]
    in_rounds = replace(Curriculum(), max_rounds=2).run(given, Rewards(values=values))
    assert in_rounds.chosen.tolist() == [True, True, True, False, False], "as with dynamic sampling"


def test_rows_are_drawn_in_proportion_to_the_variance_of_their_reward() -> None:
    difficulty = order(explore=0.2, retire=0.1)
    difficulty.load_state({"levels": [0, 0], "known": [0, 1, 2], "rows": [1, -2, -3]})
    success = [1 / (1 + exp(-1)), 1 / (1 + exp(2)), 0, *[0.5] * 97]
    weights = [p * (1 - p) for p in success]
    expected = [0.2 / 100 + 0.8 * weight / sum(weights) for weight in weights]
    np.testing.assert_allclose(difficulty.shares, expected)
    assert difficulty.metrics(np.array([0, 1]))["retired"] == 0.01
    counts = np.bincount([row for step in range(4000) for row in difficulty.draw(step, 0, 1)], minlength=100) / 4000
    np.testing.assert_allclose(counts[:4], expected[:4], atol=0.006)


@pytest.mark.parametrize("target", [0.2, 0.8])
def test_rows_at_the_target_are_drawn_most_often(target: float) -> None:
    success = np.linspace(0.06, 0.94, 89)
    difficulty = order(target=target, explore=0.0)
    difficulty.load_state(
        {"levels": [0, 0], "known": list(range(89)), "rows": np.log(success / (1 - success)).tolist()}
    )
    assert success[difficulty.shares[:89].argmax()] == pytest.approx(target)


def test_no_row_repeats_in_a_step_before_all_have_been_drawn() -> None:
    difficulty, other = order(explore=0), order(explore=0, seed=1)
    difficulty.load_state({"levels": [-9, 0], "known": [], "rows": []})
    first, rest = difficulty.draw(3, 0, 30), difficulty.draw(3, 30, 90)
    assert sorted({*first, *rest}) == list(range(100))
    assert (np.concatenate([first, rest[:20]]) % 2 == 1).all(), "retired rows come last"
    assert difficulty.draw(3, 0, 30).tolist() == first.tolist()
    assert difficulty.draw(4, 0, 30).tolist() != first.tolist() != other.draw(3, 0, 30).tolist()


def test_a_hopeless_row_returns_when_others_of_its_level_are_answered() -> None:
    difficulty, row = order(), np.array([1])
    for _ in range(9):
        difficulty.learn(row, np.array([0.0]))
    assert difficulty.success[1] < 0.05
    others = np.arange(3, 100, 2)
    for _ in range(9):
        difficulty.learn(others, np.ones(len(others)))
    assert difficulty.success[1] > 0.05
    assert (difficulty.success[::2] == 0.5).all(), "nothing is known of the other level"


def test_a_row_without_a_reward_teaches_nothing() -> None:
    difficulty = order()
    difficulty.learn(np.array([4, 5]), np.array([NAN, 1.0]))
    assert difficulty.success[4] == 0.5 < difficulty.success[5]
    restored = order()
    restored.load_state(difficulty.state())
    assert restored.success.tolist() == difficulty.success.tolist()


def test_most_prompts_are_those_that_are_answered_sometimes() -> None:
    """Every fifth row has a success rate of one half; the others are always or never answered, whatever their level."""
    rates = np.array([0.5, 0, 1, 0, 1] * 20)
    difficulty, draw = order(), np.random.default_rng(0)
    drawn = np.zeros(100)
    for step in range(120):
        rows = difficulty.draw(step, 0, 10)
        difficulty.learn(rows, draw.binomial(8, rates[rows]) / 8)
        drawn[rows] += step >= 80
    assert drawn[rates == 0.5].sum() / drawn.sum() > 0.7, "0.2 without a curriculum"


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(RecipeError, match=r"target: 0\.1 is a success rate of rows that 'retire: 0\.2' leaves out"):
        Curriculum(target=0.1, retire=0.2).check(frozenset())
    with pytest.raises(RecipeError, match="by: row 1 of 'train' of 'x' has no column 'level'"):
        Curriculum(by="level").check_rows([{"level": 1}, {"prompt": ""}], "'train' of 'x'")
