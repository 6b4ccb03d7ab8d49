"""Tasks that the library reasoning-gym generates and judges: ``data.source: reasoning_gym:chain_sum``."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.extras import check_extra

Row = dict[str, Any]


def task_rows(task: str) -> Callable[..., list[Row]]:
    """Return the function that generates the rows of a task. Raises RecipeError for an unknown task."""
    check_extra("reasoning-gym", "data.source", "its task")
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        known = sorted(DATASETS)
        raise RecipeError(
            "data.source", f"no task '{task}'", known=known, fix=did_you_mean(task, known) or "one of these"
        )
    return partial(_rows, task)


def _rows(task: str, size: int = 2000, seed: int = 0, **options: Any) -> list[Row]:
    """Generate ``size`` tasks: prompt, answer, and the library's entry. ``options`` are those of the task."""
    from reasoning_gym import create_dataset

    entries: Mapping[str, Any] = {
        entry["question"]: entry for entry in create_dataset(task, size=size, seed=seed, **options)
    }
    return [{"prompt": question, "answer": str(entry["answer"]), "entry": entry} for question, entry in entries.items()]
