"""Tasks of reasoning-gym: their rows, and the library's own score of answers."""

from typing import Any

import pytest

from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from rlflow.recipe import Data
from rlflow.rewards.base import Failure
from rlflow.rewards.callables import load_reward

# The library takes seconds to import.
pytestmark = pytest.mark.slow

SUMS: dict[str, Any] = {"size": 400, "max_terms": 2, "max_digits": 2, "operators": ["+"], "allow_negation": False}


def rows(task: str, split: str = "train", **options: Any) -> list[Any]:
    data = Data(source=f"reasoning_gym:{task}", options=options, split=split, batch_size=1, max_prompt_tokens=8)
    return list(load_rows(data, "split"))


def test_splits_share_no_question_and_are_the_same_in_every_process() -> None:
    train, test = rows("basic_arithmetic", **SUMS), rows("basic_arithmetic", "test", **SUMS)
    questions = [{row["prompt"] for row in split} for split in (train, test)]
    assert not questions[0] & questions[1]
    assert 0.05 < len(test) / (len(train) + len(test)) < 0.15
    assert test == rows("basic_arithmetic", "test", **SUMS)
    assert test != rows("basic_arithmetic", "test", **SUMS, seed=1)
    left, right = train[0]["prompt"].removeprefix("Calculate ").removesuffix(".").split(" + ")
    assert int(train[0]["answer"]) == int(left) + int(right)


@pytest.mark.parametrize("task", ["basic_arithmetic", "spell_backward", "number_sequence", "word_sorting", "countdown"])
def test_the_library_judges_its_own_answers(task: str) -> None:
    given = rows(task, size=20)
    judge = load_reward("reasoning_gym", {}, 10.0)
    answers = [row["answer"] for row in given]
    assert list(judge.call(answers, given)) == [1.0] * len(given)
    assert max(judge.call(["???"] * len(given), given)) < 0.5


def test_an_answer_may_stand_between_tags() -> None:
    [row, *_] = rows("basic_arithmetic", **SUMS)
    judge = load_reward("reasoning_gym", {"tag": "answer"}, 10.0)
    texts = [f"So <answer> {row['answer']} </answer>.", "<answer>0</answer>", row["answer"]]
    right, *wrong = judge.call(texts, [row] * 3)
    assert right == 1.0
    assert max(wrong) < 0.5


def test_rows_of_other_sources_cannot_be_judged() -> None:
    judge = load_reward("reasoning_gym", {}, 10.0)
    assert judge.check_row({"prompt": "1+1", "answer": "2"}) == Failure(
        "unreadable", "needs rows of data.source: reasoning_gym:TASK"
    )


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("basic_aritmetic", {}, r"data\.source: no task 'basic_aritmetic'[\s\S]*Fix: did you mean 'basic_arithmetic'"),
        ("basic_arithmetic", {"terms": 2}, r"data\.source: 'reasoning_gym:basic_arithmetic' failed \(.*terms"),
        ("basic_arithmetic", {"min_terms": 0}, r"data\.source: .* failed \(.*min_terms must be positive"),
    ],
)
def test_mistakes_are_named(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rows(task, **options)


def test_there_is_no_third_split() -> None:
    with pytest.raises(RecipeError, match="expected the split train or test, got 'validation'"):
        rows("basic_arithmetic", "validation")
