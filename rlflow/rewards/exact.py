"""1 where the response is the row's ``answer``, to the letter."""

from collections.abc import Mapping, Sequence
from typing import Any


def reward(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The row needs an ``answer``."""
    return [float(text.strip() == str(row["answer"]).strip()) for text, row in zip(texts, rows, strict=True)]
