"""The right answers in a row of the data set, with which built-in rewards compare a response.

An answer is a text or a number, and a row may list several. Anything else is a Failure: compared as text, it would make
every response wrong without a word.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from rlflow.rewards.base import Failure, Outcome, Row

Answer = str | int | float | Decimal

# A minus between two numbers or words is a hyphen, and a comma separates thousands.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,]*(?:\.\d+)?|(?<![\d.])\.\d+)(?:[eE][-+]?\d+)?")
_ANSWERS = "expected a text, a number, or a list of them"


def column_answers(row: Row, column: str) -> tuple[Answer, ...] | Failure:
    """Return the answers in ``column`` of the row, of which each one is right, or a Failure where there is none."""
    if isinstance(value := row.get(column), list):
        answers = [_answer(column, entry) for entry in value]
        failure = next((answer for answer in answers if isinstance(answer, Failure)), None)
        if failure is not None or not answers:
            return failure or Failure("unreadable", f"found an empty list as '{column}' of the row")
        return tuple(answer for answer in answers if not isinstance(answer, Failure))
    answer = _answer(column, value, is_missing=column not in row)
    return answer if isinstance(answer, Failure) else (answer,)


def missing_answer(row: Row) -> Failure | None:
    """Return why the row has no ``answer`` to compare with; None if it has."""
    answers = column_answers(row, "answer")
    return answers if isinstance(answers, Failure) else None


def column_text(row: Row, column: str) -> str | Failure:
    """Return the text or the number in ``column`` of the row as text, or a Failure for anything else."""
    answer = _answer(column, row.get(column), is_missing=column not in row)
    return answer if isinstance(answer, Failure) else str(answer)


def _answer(column: str, value: Any, *, is_missing: bool = False) -> Answer | Failure:
    if value is None or value != value:
        return Failure("unreadable", f"found no '{column}' in the row ({'missing' if is_missing else value})")
    if isinstance(value, bool) or not isinstance(value, Answer):
        return Failure("unreadable", f"cannot use '{column}' of the row ({_ANSWERS}, got {str(value)[:80]})")
    if isinstance(value, str) and not value.strip():
        return Failure("unreadable", f"found an empty text as '{column}' of the row")
    return value


def compare_any(answers: tuple[Answer, ...] | Failure, is_right: Callable[[Answer], bool | Failure]) -> Outcome:
    """Return 1 if the response is right for one of the answers, 0 if for none, and the Failure of an answer."""
    if isinstance(answers, Failure):
        return answers
    results = [is_right(answer) for answer in answers]
    failure = next((result for result in results if isinstance(result, Failure)), None)
    return failure or float(any(results))


def plain_text(answer: Answer) -> str:
    """Return the answer as text, a number without an exponent: 0.00001 for 1e-05."""
    if isinstance(answer, str) or not math.isfinite(answer):
        return str(answer)
    return format(Decimal(str(answer)), "f")


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, written as in 7, -1,200.5, .5 or 1e-3; None without one."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent of more than 18 digits, which equals no answer
        return None


def whole_number(text: str) -> Decimal | None:
    """Return the number that the whole text is; None for any other text."""
    return last_number(text) if _NUMBER.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-")) else None
