"""0 for a response that is short enough, down to -1 for one that is too long."""

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow.errors import RecipeError
from rlflow.rewards.base import Row, batched


def check(*, max_characters: int, buffer: int) -> None:
    """Raises RecipeError: a response of no characters would be too long already."""
    if buffer > max_characters:
        raise RecipeError("options.buffer", f"{buffer} is more than max_characters, {max_characters}")


@batched(64)
def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    max_characters: Annotated[int, Gt(0)],
    buffer: Annotated[int, Ge(0)] = 0,
) -> list[float]:
    """Falls linearly over the last ``buffer`` characters before ``max_characters``.

    Source: DAPO (arXiv 2503.14476), equation 13, which counts tokens.
    """
    return [_of(len(text), max_characters, buffer) for text in texts]


def _of(length: int, limit: int, buffer: int) -> float:
    if length > limit:
        return -1.0
    return -(length - (limit - buffer)) / buffer if length > limit - buffer else 0.0
