"""Rollouts in files of a checkpoint, as arrays and JSON. Rows of the data set are read from the data again."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.runtime.objects.batch_files import read_fields, write_fields

_KINDS = {kind.__name__: kind for kind in (Rollouts, Conversations)}


def save_rollouts(file: Path, rollouts: Rollouts, prompts: Prompts) -> None:
    """Write rollouts of these prompts to ``file``, which ends in ``.npz``.

    Unfinished conversations with an environment that JSON cannot hold are left out, and begin again in a resumed run:
    their environment is a pickle, and a checkpoint may come from anyone.
    """
    rollouts, rows = _without_pickles(rollouts), _rows_of(prompts)
    # An environment may have added values to a row.
    added = [
        {name: value for name, value in row.items() if name not in rows[key]}
        for key, row in zip(_prompt_keys(rollouts.keys), rollouts.rows, strict=True)
    ]
    kind = type(rollouts).__name__
    write_fields(file, {**vars(rollouts), "texts": list(rollouts.texts), "rows": added, "kind": kind})


def load_rollouts(file: Path, prompts: Prompts) -> Rollouts:
    """Return the rollouts that ``save_rollouts`` wrote for the same prompts."""
    found = read_fields(file)
    kind, added = _KINDS[found.pop("kind")], found.pop("rows")
    rows = _rows_of(prompts)
    own = [rows[key] | more for key, more in zip(_prompt_keys(found["keys"]), added, strict=True)]
    return _without_pickles(kind(**{**found, "texts": tuple(found["texts"]), "rows": tuple(own)}))


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
