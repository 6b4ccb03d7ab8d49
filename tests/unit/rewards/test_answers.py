"""Answers of all forms that data files hold: each right response gets 1, or the row is refused, never a silent 0."""

import inspect
from decimal import Decimal
from typing import Any

import pytest

from rlflow.rewards.base import Failure
from rlflow.rewards.functions import exact, judge, math, number

# A response that is right for the answer, and one that is wrong.
EXACT: list[tuple[Any, str, str]] = [
    (["paris", "the city of paris"], "the city of paris", "rome"),
    (["4"], "4", "['4']"),
    ([4, "four"], "4.0", "5"),
    (3, "3", "4"),
    (3.0, "3", "3.5"),
    (1e-05, "0.00001", "0.0001"),
    (Decimal("0.10"), "0.1", "0.01"),
    (0.5, ".5", "5"),
    (2**70, str(2**70), str(2**70 + 1)),
    ("007", "007", "7"),
    ("2024-01-02", "2024-01-02", "2024-01-02 00:00:00"),
]
NUMBER: list[tuple[Any, str, str]] = [
    (["#### 3", "#### 4"], "it is 4", "it is 34"),
    (".5", "0.5", "5"),
    ("1e-1", "0.1", "it is -1"),
    (1e-05, "1e-05", "-5"),
    (1e-05, "0.00001", "5"),
    ("-3", "so x=\N{MINUS SIGN}3", "so x=3"),
    ("3", "it is 10-3", "it is -3"),
    ("1,200.50", "$1200.5", "200.5"),
    ("3", "version 1.2.3", "0.3"),
    (7, "7.0 in all", "70"),
    ("#### 42", "2+40=42\n#### 42\nI used 2 numbers.", "2+40=42\n#### 2\nIt is 42."),
    ("42", r"so \boxed{42}, after 3 steps", r"so \boxed{3}, not 42"),
    ("42", "#### Step 3\n6 times 7 is 42", "#### Step 42\n6 times 7 is 3"),
    ("1200", "#### 1,200.\nIn 2 steps.", "#### 1.\nIt is 1200"),
]
MATH: list[tuple[Any, str, str]] = [
    (["1/2", "2"], r"\boxed{2}", r"\boxed{12}"),
    (1e-05, r"\boxed{10^{-5}}", r"\boxed{10^{-4}}"),
    (1e-05, "it is 1e-05", "it is 1e-04"),
    (1e-05, r"\boxed{1.0e-5}", r"\boxed{1}"),
    ("2.5e3", r"\boxed{2500}", r"\boxed{25}"),
    ("0.05", "so 5E-2.", "so 5"),
    ("2e", r"\boxed{e + e}", r"\boxed{2}"),
    (0.5, r"\boxed{\frac{1}{2}}", r"\boxed{5}"),
    ("50%", "The answer is 50%.", "The answer is 5%."),
    ("50%", r"\boxed{50\%}", r"\boxed{500\%}"),
    (r"50\%", r"\boxed{50%}", r"\boxed{5}"),
    ("#### 7.5%", r"so $7.5\%$", "so 75"),
    ("50 %", "it is 0.5", "it is 0.05"),
    ("$12.5\\%$", r"\boxed{\frac{1}{8}}", r"\boxed{\frac{1}{80}}"),
    ("B", "B", "A"),
    ("3:00", r"\boxed{3:00}", r"\boxed{4:00}"),
    ("0:00", "0:00", "1:00"),
    (r"\text{(C)}", r"\boxed{\text{(C)}}", r"\boxed{\text{(D)}}"),
    (3, "3", "4"),
]


@pytest.mark.parametrize(
    ("function", "answer", "right", "wrong"),
    [(f, *case) for f, cases in ((exact, EXACT), (number, NUMBER), (math, MATH)) for case in cases],
)
def test_a_right_and_a_wrong_response(function: Any, answer: Any, right: str, wrong: str) -> None:
    assert function.reward([right, wrong], [{"answer": answer}] * 2) == [1.0, 0.0]


def test_a_number_beyond_all_limits_is_wrong_and_no_error() -> None:
    assert number.reward(["it is 1e99999999999999999999"], [{"answer": "3"}]) == [0.0]
    assert exact.reward(["1e99999999999999999999"], [{"answer": 3}]) == [0.0]


CANNOT_USE = "cannot use 'answer' of the row (expected a text, a number, or a list of them"


@pytest.mark.parametrize("function", [exact, number, math])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([], "found an empty list as 'answer' of the row"),
        ("", "found an empty text as 'answer' of the row"),
        (["3", ""], "found an empty text as 'answer' of the row"),
        (["3", None], "found no 'answer' in the row (None)"),
        ([["3"]], f"{CANNOT_USE}, got ['3'])"),
        ({"value": 3}, f"{CANNOT_USE}, got {{'value': 3}})"),
        (True, f"{CANNOT_USE}, got True)"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_refused(function: Any, answer: Any, reason: str) -> None:
    assert function.reward(["3"], [{"answer": answer}]) == [Failure("unreadable", reason)]


SCORES = {
    "Score: 8": 8,
    "**Score:** 8": 8,
    "Score: **8**": 8,
    "__Score__: 8.": 8,
    "score : 8": 8,
    "SCORE = -2": -2,
    "Score: 1e-1": 0.1,
    "Score: .5": 0.5,
    "Score: 8/10": 8,
    "Score: 3. Final score: 4": 4,
}


def test_scores_of_a_judge() -> None:
    pattern = inspect.signature(judge.reward).parameters["score"].default
    assert {text: float(pattern.findall(text)[-1]) for text in SCORES} == SCORES
    no_scores = ["Score: high", "Score: 1,000", "Score: 50%", "Score: 3-5", "Score: 8th", "Score: 1.2.3", "Scores 8"]
    assert [text for text in no_scores if pattern.search(text)] == []


def test_a_judge_is_never_shown_the_text_of_a_list() -> None:
    rows = [{"answer": ["paris", "rome"]}]
    options: dict[str, Any] = {"url": "http://localhost:1/v1", "model": "wise", "timeout_s": 1.0}
    (failure,) = judge.reward(["paris"], rows, prompt="{answer} {response}", **options)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("cannot use 'answer' of the row (expected a text, a number")
    (failure,) = judge.reward(["paris"], rows, prompt="{answer[2]} {response}", **options)
    assert failure == Failure("unreadable", "found no 'answer[2]' in the row (None)")
