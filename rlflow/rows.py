"""Rows of several fields: what all batches are.

Ragged data is packed, never padded: one array a field, with offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlflow.packed import Packed, Records, compact, expanded

Rows = NDArray[np.integer[Any]]


class Batch:
    """Rows of several fields, each of which has as many rows; numbers and None are of the whole batch.

    A field is an array [rows, ...], Packed, a mapping of either, or a sequence of texts or of rows of the data set.
    What is declared as Repeated travels as such, and takes no room in a store.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def take(self, rows: Rows) -> Self:
        """These rows, in this order."""
        return self._each(lambda value: _taken(value, rows))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All parts, one after another; what is of the whole batch is that of the first."""
        if len(parts) == 1:
            return parts[0]
        fields = {name: _joined([getattr(part, name) for part in parts]) for name in vars(parts[0])}
        return cls(**fields)

    def mapped(self, function: Callable[[Packed], Packed]) -> Self:
        """With ``function`` applied to every packed field; texts and rows are packed for it."""
        return self._each(lambda value: _mapped(value, function))

    def _each(self, function: Callable[[Any], Any]) -> Self:
        changed: Self = replace(self, **{name: function(value) for name, value in vars(self).items()})  # type: ignore[type-var]
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {
            name: compact(value) if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        }
        return _restored, (type(self), fields)


def _restored(kind: type[Batch], fields: Mapping[str, Any]) -> Batch:
    return kind(**{name: expanded(value) for name, value in fields.items()})


def _taken(value: Any, rows: Rows) -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, Packed | Records):
        return value.take(rows)
    if isinstance(value, Mapping):
        return {name: _taken(column, rows) for name, column in value.items()}
    return tuple(value[row] for row in rows) if isinstance(value, Sequence) else value


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Packed):
        return Packed.joined(values)
    if isinstance(first, Mapping):
        return {name: _joined([value[name] for value in values]) for name in first}
    if all(isinstance(value, Records) for value in values):
        return Records.joined(values)
    return tuple(item for value in values for item in value) if isinstance(first, Sequence) else first


def _mapped(value: Any, function: Callable[[Packed], Packed]) -> Any:
    if isinstance(value, Packed):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _mapped(column, function) for name, column in value.items()}
    if isinstance(value, Sequence):
        records = value if isinstance(value, Records) else Records.of(value)
        return Records(function(records.column))
    return value
