"""Rows that libraries generate, such as those of ``data.source: reasoning_gym:chain_sum``."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflow.agents.sources import textarena, verifiers
from rlflow.data import reasoning_gym

Row = dict[str, Any]

# This many of 256 prompts are held out.
_TEST_SHARE = 26
_LIBRARIES: Mapping[str, Callable[[str], Callable[..., list[Row]]]] = {
    "reasoning_gym": reasoning_gym.task_rows,
    "textarena": textarena.game_rows,
    "verifiers": verifiers.task_rows,
}


def generated_rows(source: str) -> Callable[..., list[Row]] | None:
    """Return the function that generates the rows of a split, or None for another source. Raises RecipeError."""
    library, _, task = source.partition(":")
    return partial(_split_rows, _LIBRARIES[library](task)) if library in _LIBRARIES else None


def _split_rows(rows: Callable[..., list[Row]], split: str, **options: Any) -> list[Row]:
    """Return the rows of a split. Every tenth prompt, chosen by a hash, belongs to ``test``; splits share no prompt.

    Raises ValueError for another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected the split train or test, got '{split}'")
    return [row for row in rows(**options) if _is_test(row["prompt"]) == (split == "test")]


def _is_test(prompt: Any) -> bool:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] < _TEST_SHARE
