"""Rollouts in files of a checkpoint, as arrays and JSON. Rows of the data set are read from the data again."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Packed, Prompts, Repeated, Rollouts
from rlflow.packed import offsets_of

_KINDS = {kind.__name__: kind for kind in (Rollouts, Conversations)}
_VALUES, _LENGTHS, _RUNS = ".values", ".lengths", ".runs"


def save_rollouts(file: Path, rollouts: Rollouts, prompts: Prompts) -> None:
    """Write rollouts of these prompts to ``file``, which ends in ``.npz``.

    Unfinished conversations with an environment that JSON cannot hold are left out, and begin again in a resumed run:
    their environment is a pickle, and a checkpoint may come from anyone.
    """
    rollouts, rows = _without_pickles(rollouts), _rows_of(prompts)
    other: dict[str, Any] = {"kind": type(rollouts).__name__, "texts": list(rollouts.texts)}
    # An environment may have added values to a row.
    other["rows"] = [
        {name: value for name, value in row.items() if name not in rows[key]}
        for key, row in zip(_prompt_keys(rollouts.keys), rollouts.rows, strict=True)
    ]
    arrays: dict[str, Any] = {}
    for field in fields(rollouts):
        value = getattr(rollouts, field.name)
        if isinstance(value, Packed):
            suffix = _RUNS if isinstance(value, Repeated) else _VALUES
            arrays |= {field.name + suffix: value.values, field.name + _LENGTHS: value.lengths}
        elif isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif field.name not in other:
            other[field.name] = value
    arrays["other"] = np.frombuffer(json.dumps(other).encode(), np.uint8)
    np.savez(file, **arrays)


def load_rollouts(file: Path, prompts: Prompts) -> Rollouts:
    """Return the rollouts that ``save_rollouts`` wrote for the same prompts."""
    with np.load(file) as saved:
        arrays = dict(saved)
    other = json.loads(arrays.pop("other").tobytes())
    kind, added = _KINDS[other.pop("kind")], other.pop("rows")
    found: dict[str, Any] = {**other, "texts": tuple(other["texts"])}
    for name, array in arrays.items():
        stem, dot, rest = name.partition(".")
        suffix = dot + rest
        if suffix == _LENGTHS:
            continue
        column = Packed(array, offsets_of(arrays[stem + _LENGTHS])) if suffix else array
        found[stem] = Repeated.from_packed(column) if suffix == _RUNS else column
    rows = _rows_of(prompts)
    own = [rows[key] | more for key, more in zip(_prompt_keys(found["keys"]), added, strict=True)]
    return _without_pickles(kind(**found, rows=tuple(own)))


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
