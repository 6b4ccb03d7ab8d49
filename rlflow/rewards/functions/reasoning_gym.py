"""The score from 0 to 1 that the library reasoning-gym gives for the answer to one of its tasks."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rlflow.rewards.base import Failure, Row, batched
from rlflow.schema import Text

EXTRA = "reasoning-gym"


def prepare() -> None:
    """Import reasoning-gym, which takes two seconds."""
    import reasoning_gym  # noqa: F401


def check_row(row: Row) -> Failure | None:
    """Return why a row cannot be judged: it is not of ``data.source: reasoning_gym:TASK``."""
    return None if "entry" in row else Failure("unreadable", "needs rows of data.source: reasoning_gym:TASK")


@batched(16)
def reward(texts: Sequence[str], rows: Sequence[Row], *, tag: Text | None = None) -> list[float | Failure]:
    """Judge the whole response, or with a ``tag`` what stands between its last opening and closing tags.

    A response without these gets 0.
    """
    return [check_row(row) or _score(text, row["entry"], tag) for text, row in zip(texts, rows, strict=True)]


def _score(text: str, entry: dict[str, Any], tag: str | None) -> float:
    from reasoning_gym.utils import extract_answer

    answer = text.strip() if tag is None else extract_answer(text, tag)
    return float(_judge(entry["metadata"]["source_dataset"])(answer, entry))


@cache
def _judge(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    judge: Callable[[str | None, dict[str, Any]], float] = get_score_answer_fn(task)
    return judge
