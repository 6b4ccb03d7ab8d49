"""Batches in files: arrays in numpy's format, all else as JSON, and no pickles."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Packed, Repeated
from rlflow.packed import offsets_of

_VALUES, _LENGTHS, _RUNS = ".values", ".lengths", ".runs"
_OTHER = "other"


def write_fields(file: Path, values: Mapping[str, Any]) -> None:
    """Write the fields of a batch to ``file``, which ends in ``.npz``. Raises TypeError for a value that JSON lacks."""
    arrays: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Packed):
            suffix = _RUNS if isinstance(value, Repeated) else _VALUES
            arrays |= {name + suffix: value.values, name + _LENGTHS: value.lengths}
        elif isinstance(value, np.ndarray) and value.dtype != object:
            arrays[name] = value
        else:
            other[name] = value
    arrays[_OTHER] = np.frombuffer(json.dumps(other).encode(), np.uint8)
    np.savez(file, **arrays)


def read_fields(file: Path) -> dict[str, Any]:
    """Return what ``write_fields`` wrote, by field. Sequences are lists."""
    with np.load(file, allow_pickle=False) as saved:
        arrays = dict(saved)
    found: dict[str, Any] = json.loads(arrays.pop(_OTHER).tobytes())
    for name, array in arrays.items():
        stem, dot, rest = name.partition(".")
        suffix = dot + rest
        if suffix == _LENGTHS:
            continue
        column = Packed(array, offsets_of(arrays[stem + _LENGTHS])) if suffix else array
        found[stem] = Repeated.from_packed(column) if suffix == _RUNS else column
    return found
