from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlflow.errors import RecipeError
from rlflow.nodes.reward import Reward
from rlflow.rewards.functions import exact, number
from tests.helpers import rollouts, sequences

ROLLOUTS = rollouts(sequences([2], [[1, 1]]), texts=["1", "2"])
Rows = Sequence[Mapping[str, Any]]


def good(texts: Sequence[str], rows: Rows) -> list[int]:
    return [int(text) for text in texts]


def raising(texts: Sequence[str], rows: Rows) -> list[float]:
    raise KeyError("solution")


def too_few(texts: Sequence[str], rows: Rows) -> list[float]:
    return [1.0] * (len(texts) - 1)


def not_a_number(texts: Sequence[str], rows: Rows) -> list[float]:
    return [float("nan") if text == "2" else 1.0 for text in texts]


def not_numbers(texts: Sequence[str], rows: Rows) -> list[str]:
    return ["yes"] * len(texts)


def test_a_function_of_the_users_own() -> None:
    assert Reward(function=f"{__name__}:good").run(ROLLOUTS).values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "raising' failed (KeyError: 'solution')"),
        (too_few, "too_few' returned 0 values for 1 response"),
        (not_a_number, "not_a_number' returned nan for the response '2'"),
        (not_numbers, "not_numbers' failed (ValueError: could not convert string to float: 'yes')"),
    ],
)
def test_a_reward_that_fails_is_never_a_number(function: Any, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        Reward(function=f"{__name__}:{function.__name__}").run(ROLLOUTS)
    assert message in str(raised.value)


def test_exact() -> None:
    assert exact.reward([" 12 ", "12.", "1"], [{"answer": 12}] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 1,234.", "... #### 1234", 1),
        ("3 and then 4.50", "#### 4.5", 1),
        ("it is -3", "#### 3", 0),
        ("none", "#### 3", 0),
        ("3 or 5", "#### 3", 0),
    ],
)
def test_number(text: str, answer: str, reward: float) -> None:
    assert number.reward([text], [{"answer": answer}]) == [reward]
