"""1 where the last number of the response is the last number of the row's ``answer``, as in GSM8K."""

import re
from collections.abc import Sequence
from decimal import Decimal

from rlflow.rewards.base import Row, batched

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """The row needs an ``answer``."""
    return [_matches(text, str(row["answer"])) for text, row in zip(texts, rows, strict=True)]


def _matches(text: str, answer: str) -> float:
    given, wanted = _last_number(text), _last_number(answer)
    return float(given is not None and given == wanted)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
