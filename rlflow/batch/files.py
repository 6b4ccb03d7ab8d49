"""Batches in files: arrays in numpy's format, all else as JSON, and no pickles."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlflow.batch import Conversations, Packed, Records, Repeated, Rollouts
from rlflow.batch.packed import offsets_of
from rlflow.errors import StorageError

_VALUES, _LENGTHS, _RUNS = ".values", ".lengths", ".runs"
_RUN_LENGTHS, _RUNS_PER_ROW = ".run_lengths", ".runs_per_row"
_OTHER = "other"
_KINDS = {kind.__name__: kind for kind in (Rollouts, Conversations)}


def write_fields(file: Path | IO[bytes], values: Mapping[str, Any]) -> None:
    """Write the fields of a batch to ``file``, whose name ends in ``.npz``.

    Raises TypeError for a value that JSON lacks.
    """
    arrays: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Repeated):
            per_row = np.ones(len(value), np.int64) if value.runs_per_row is None else value.runs_per_row
            arrays |= {name + _RUNS: value.run_values, name + _RUN_LENGTHS: value.run_lengths}
            arrays[name + _RUNS_PER_ROW] = per_row
        elif isinstance(value, Packed):
            arrays |= {name + _VALUES: value.values, name + _LENGTHS: value.lengths}
        elif isinstance(value, np.ndarray) and value.dtype != object:
            arrays[name] = value
        else:
            other[name] = list(value) if isinstance(value, Records) else value
    arrays[_OTHER] = np.frombuffer(json.dumps(other).encode(), np.uint8)
    np.savez(file, **arrays)


def read_fields(file: Path | IO[bytes]) -> dict[str, Any]:
    """Return what ``write_fields`` wrote, by field. Sequences are lists. Raises StorageError for an older format."""
    with np.load(file, allow_pickle=False) as saved:
        arrays = dict(saved)
    found: dict[str, Any] = json.loads(arrays.pop(_OTHER).tobytes())
    for name, array in arrays.items():
        stem, dot, rest = name.partition(".")
        suffix = dot + rest
        if suffix == _VALUES:
            found[stem] = Packed(array, offsets_of(arrays[stem + _LENGTHS]))
        elif suffix == _RUNS:
            if stem + _RUNS_PER_ROW not in arrays:
                raise _older_format(file)
            per_row = arrays[stem + _RUNS_PER_ROW]
            found[stem] = Repeated(array, arrays[stem + _RUN_LENGTHS], None if (per_row == 1).all() else per_row)
        elif not suffix:
            found[stem] = array
    return found


def write_rollouts(file: Path | IO[bytes], rollouts: Rollouts, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rollouts without their images.

    Of each row of data, only the values are written that an environment has added to the given ``rows``.
    """
    added: list[dict[str, Any]] = [{}] * len(rollouts)
    if rollouts.rows is not rows:
        pairs = zip(rollouts.rows, rows, strict=True)
        added = [{name: value for name, value in row.items() if name not in given} for row, given in pairs]
    kind = type(rollouts).__name__
    write_fields(file, {**vars(rollouts), "images": None, "rows": added, "kind": kind})


def read_rollouts(file: Path | IO[bytes]) -> Rollouts:
    """Return what ``write_rollouts`` wrote. Rows hold the added values alone. Raises StorageError if it is older."""
    found = read_fields(file)
    kind = _KINDS[found.pop("kind")]
    if found.keys() != {field.name for field in fields(kind)}:
        raise _older_format(file)
    return kind(**{**found, "texts": tuple(found["texts"]), "rows": tuple(found["rows"])})


def _older_format(file: Path | IO[bytes]) -> StorageError:
    return StorageError(
        f"{file}: expected the format of this version of rlflow, got that of an older one.\n"
        "  Fix: read the run with the version that wrote it, or start a new run without resume."
    )
