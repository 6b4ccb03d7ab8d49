"""A penalty for long responses, from 0 for one that is short enough to -1 for one that is too long."""

from collections.abc import Sequence

from rlflow.errors import RecipeError
from rlflow.rewards.base import Row, batched
from rlflow.schema import Count, CountOrZero


def check(*, max_characters: int, buffer: int) -> None:
    """Raise RecipeError for a buffer that would penalize even an empty response."""
    if buffer > max_characters:
        fact = f"expected at most max_characters, {max_characters}, got {buffer}"
        raise RecipeError("options.buffer", fact, fix=f"use {max_characters} or less")


@batched(64)
def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    max_characters: Count,
    buffer: CountOrZero = 0,
) -> list[float]:
    """Return penalties that fall linearly over the last ``buffer`` characters before ``max_characters``.

    Source: DAPO (arXiv 2503.14476), equation 13, which counts tokens.
    """
    return [_penalty(len(text), max_characters, buffer) for text in texts]


def _penalty(length: int, limit: int, buffer: int) -> float:
    if length > limit:
        return -1.0
    return -(length - (limit - buffer)) / buffer if length > limit - buffer else 0.0
