"""1 where the response is the row's ``answer``, to the letter."""

from collections.abc import Sequence

from rlflow.rewards.base import Row, batched


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """The row needs an ``answer``."""
    return [float(text.strip() == str(row["answer"]).strip()) for text, row in zip(texts, rows, strict=True)]
