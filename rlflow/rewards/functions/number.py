"""1 where the last number of the response is the last number of the row's ``answer``, as in GSM8K."""

import re
from collections.abc import Sequence
from decimal import Decimal

from rlflow.rewards.base import Failure, Outcome, Row, batched, text_of

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """The row needs an ``answer`` with a number in it."""
    return [_compared(text, text_of(row, "answer")) for text, row in zip(texts, rows, strict=True)]


def _compared(text: str, answer: str | Failure) -> Outcome:
    if isinstance(answer, Failure):
        return answer
    wanted = _last_number(answer)
    if wanted is None:
        return Failure("unreadable", f"found no number in the row's answer {answer[-80:]!r}")
    return float(_last_number(text) == wanted)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
