"""1 if the response's answer equals the row's ``answer`` mathematically, by the library math-verify; 0 otherwise."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlflow.rewards.answers import Answer, column_answers, compare_any, missing_answer, plain_text
from rlflow.rewards.base import Failure, Outcome, Row

EXTRA = "math-verify"

check_row = missing_answer


def prepare() -> None:
    """Import math-verify, which takes long."""
    import math_verify  # noqa: F401

    # It warns that its time limits are off: they use alarms, and the pool enforces the deadline instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare the answer in each response with the ``answer`` of its row.

    The row's ``answer`` is a number, LaTeX, a text whose last line is ``#### answer``, or a list of them, of which each
    is right. The answer in a response is
    the content of ``\\boxed{}``, or else the last part that can be read as an answer.
    """
    prepare()
    return [
        compare_any(column_answers(row, "answer"), partial(_equals, text))
        for text, row in zip(texts, rows, strict=True)
    ]


def _equals(text: str, answer: Answer) -> bool | Failure:
    from math_verify import verify

    expected = _parse(_boxed(plain_text(answer)))
    if not expected:
        return Failure("unreadable", f"cannot read the row's answer {str(answer)[-80:]!r}")
    return bool(verify(expected, _parse(text), timeout_seconds=None, raise_on_error=True))


def _boxed(answer: str) -> str:
    """Return the row's answer in the form that math-verify parses most reliably."""
    answer = answer.rpartition("####")[2].strip()
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    candidates: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return candidates
