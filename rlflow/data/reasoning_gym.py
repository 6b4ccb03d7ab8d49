"""Tasks that the library reasoning-gym generates and judges: ``data.source: reasoning_gym:chain_sum``."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.extras import check_extra

PREFIX = "reasoning_gym:"
Row = dict[str, Any]

# This many of 256 questions are held out.
_TEST_SHARE = 26


def task_rows(source: str) -> Callable[..., list[Row]]:
    """Return the function that generates the rows of a split of a task. Raises RecipeError for an unknown task."""
    check_extra("reasoning-gym", "data.source", "its task")
    from reasoning_gym.factory import DATASETS

    task = source.removeprefix(PREFIX)
    if task not in DATASETS:
        known = sorted(DATASETS)
        raise RecipeError(
            "data.source", f"no task '{task}'", known=known, fix=did_you_mean(task, known) or "one of these"
        )
    return partial(_rows, task)


def _rows(task: str, split: str, size: int = 2000, seed: int = 0, **options: Any) -> list[Row]:
    """Generate ``size`` tasks, and return those of a split: prompt, answer, and the library's entry.

    Every tenth question, chosen by a hash, belongs to ``test``, so that the splits share none. ``options`` are those of
    the task. Raises ValueError for another split.
    """
    from reasoning_gym import create_dataset

    if split not in ("train", "test"):
        raise ValueError(f"expected the split train or test, got '{split}'")
    entries: Mapping[str, Any] = {
        entry["question"]: entry for entry in create_dataset(task, size=size, seed=seed, **options)
    }
    return [
        {"prompt": question, "answer": str(entry["answer"]), "entry": entry}
        for question, entry in entries.items()
        if _is_test(question) == (split == "test")
    ]


def _is_test(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] < _TEST_SHARE
