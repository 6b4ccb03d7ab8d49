"""1 if the response is exactly the row's ``answer``, apart from spaces around it; 0 otherwise."""

from collections.abc import Sequence

from rlflow.rewards.base import Failure, Outcome, Row, batched, column_text


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare each response with the ``answer`` of its row."""
    return [_compare(text, column_text(row, "answer")) for text, row in zip(texts, rows, strict=True)]


def _compare(text: str, answer: str | Failure) -> Outcome:
    return answer if isinstance(answer, Failure) else float(text.strip() == answer.strip())
