"""1 if the response is exactly the row's ``answer``, apart from spaces around it; 0 otherwise."""

from collections.abc import Sequence
from decimal import Decimal
from functools import partial

from rlflow.rewards.answers import Answer, column_answers, compare_any, missing_answer, whole_number
from rlflow.rewards.base import Outcome, Row, batched

check_row = missing_answer


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare each response with the ``answer`` of its row, or with each answer of a list.

    A number in the row equals every way of writing it: 3, 3.0 and 3e0.
    """
    return [
        compare_any(column_answers(row, "answer"), partial(_equals, text))
        for text, row in zip(texts, rows, strict=True)
    ]


def _equals(text: str, answer: Answer) -> bool:
    if isinstance(answer, str):
        return text.strip() == answer.strip()
    return text.strip() == str(answer) or whole_number(text) == Decimal(str(answer))
