"""1 if the number of the response equals the last number of the row's ``answer``, as in GSM8K; 0 otherwise."""

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial

from rlflow.rewards.answers import Answer, column_answers, compare_any, last_number, plain_text, whole_number
from rlflow.rewards.base import Failure, Outcome, Row, batched

# The marks of an answer in a response. Other lines with these signs are headings of Markdown.
_MARKED = re.compile(r"^#### *(.+?)\.?\s*$|\\boxed\{([^{}]*)\}", re.MULTILINE)


def check_row(row: Row) -> Failure | None:
    """Return why the row has no number to compare with; None if it has."""
    answers = column_answers(row, "answer")
    if isinstance(answers, Failure):
        return answers
    numbers = [_expected(answer) for answer in answers]
    return next((number for number in numbers if isinstance(number, Failure)), None)


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare the number of each response with the last one in the ``answer`` of its row, or of each in a list.

    The number of a response is that of its last ``#### N`` or ``\\boxed{N}``, or else its last number.
    """
    return [
        compare_any(column_answers(row, "answer"), partial(_equals, text))
        for text, row in zip(texts, rows, strict=True)
    ]


def _equals(text: str, answer: Answer) -> bool | Failure:
    expected = _expected(answer)
    return expected if isinstance(expected, Failure) else _response_number(text) == expected


def _response_number(text: str) -> Decimal | None:
    marked = [whole_number(line or boxed) for line, boxed in _MARKED.findall(text)]
    return next((number for number in reversed(marked) if number is not None), last_number(text))


def _expected(answer: Answer) -> Decimal | Failure:
    number = last_number(plain_text(answer))
    if number is None:
        return Failure("unreadable", f"found no number in the row's answer {str(answer)[-80:]!r}")
    return number
