"""1 where the response is the row's ``answer``, to the letter."""

from collections.abc import Sequence

from rlflow.rewards.base import Failure, Outcome, Row, batched, text_of


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """The row needs an ``answer``."""
    return [_compared(text, text_of(row, "answer")) for text, row in zip(texts, rows, strict=True)]


def _compared(text: str, answer: str | Failure) -> Outcome:
    return answer if isinstance(answer, Failure) else float(text.strip() == answer.strip())
