"""1 if the last number of the response equals the last number of the row's ``answer``, as in GSM8K; 0 otherwise."""

import re
from collections.abc import Sequence
from decimal import Decimal

from rlflow.rewards.base import Failure, Outcome, Row, batched, column_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare the last number of each response with the last one in the ``answer`` of its row."""
    return [_compare(text, column_text(row, "answer")) for text, row in zip(texts, rows, strict=True)]


def _compare(text: str, answer: str | Failure) -> Outcome:
    if isinstance(answer, Failure):
        return answer
    expected = _last_number(answer)
    if expected is None:
        return Failure("unreadable", f"found no number in the row's answer {answer[-80:]!r}")
    return float(_last_number(text) == expected)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
