"""Rollouts in files of a checkpoint. Rows of the data set are read from the data again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.batch.files import read_rollouts, write_rollouts


def save_rollouts(file: Path, rollouts: Rollouts, prompts: Prompts) -> None:
    """Write rollouts of these prompts to ``file``, which ends in ``.npz``.

    Unfinished conversations with an environment that JSON cannot hold are left out, and begin again in a resumed run:
    their environment is a pickle, and a checkpoint may come from anyone.
    """
    rollouts, rows = _without_pickles(rollouts), _rows_of(prompts)
    write_rollouts(file, rollouts, [rows[key] for key in _prompt_keys(rollouts.keys)])


def load_rollouts(file: Path, prompts: Prompts) -> Rollouts:
    """Return the rollouts that ``save_rollouts`` wrote for the same prompts."""
    found, rows = read_rollouts(file), _rows_of(prompts)
    own = (rows[key] | dict(added) for key, added in zip(_prompt_keys(found.keys), found.rows, strict=True))
    return _without_pickles(replace(found, rows=tuple(own)))


def _without_pickles(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts without unfinished conversations whose environment is a pickle."""
    if not isinstance(rollouts, Conversations):
        return rollouts
    rests = (rollouts.unfinished[row].tobytes() for row in range(len(rollouts)))
    return rollouts.take(np.flatnonzero([not rest or rest.startswith(b"{") for rest in rests]))


def _rows_of(prompts: Prompts) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the row of each prompt, by step and prompt."""
    return {key: dict(row) for key, row in zip(_prompt_keys(prompts.keys), prompts.rows, strict=True)}


def _prompt_keys(keys: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(int(step), int(prompt)) for step, prompt, _ in keys]
