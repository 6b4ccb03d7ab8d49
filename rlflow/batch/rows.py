"""The base of all batches: several fields that have the same number of rows.

Fields with rows of different lengths are packed, never padded: one array with offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.packed import Packed, Records, compress, decompress

Rows = NDArray[np.integer[Any]]

MAX_ROWS = 2**31 - 1
"""The most rows of a batch: arrays count them in 32 bits."""


class Batch:
    """Several fields with the same number of rows. Fields that are numbers or None describe the whole batch.

    A field is an array [rows, ...], Packed, a mapping of either, or a sequence of texts or of rows of the data set.
    A field declared as Repeated is sent in its short form and takes no space in an object store.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers to report of this batch, by name; they become the metrics NODE/NAME of a step."""
        return {}

    def failures(self) -> Mapping[str, int]:
        """Return why samples could not be judged, the most frequent reason first, and how many samples each."""
        return {}

    def take(self, rows: Rows) -> Self:
        """Return these rows, in this order."""
        return self._replace_fields(lambda value: _take(value, rows))

    def take_units(self, units: Rows, num_units: int) -> Self:
        """Return the rows of these units, such as samples or groups. All have equally many rows, in their order."""
        each, remainder = divmod(len(self), num_units)
        assert not remainder
        return self.take((np.asarray(units)[:, None] * each + np.arange(each)).ravel())

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return all rows of the parts in order. Fields that describe the whole batch come from the first part.

        All parts have the same class, which may be a subclass. A packed field that is None in some parts has empty rows
        there.
        """
        if len(parts) == 1:
            return parts[0]
        counts = [len(part) for part in parts]
        fields = {name: _concatenate([getattr(part, name) for part in parts], counts) for name in vars(parts[0])}
        return type(parts[0])(**fields)

    @classmethod
    def has_batch_numbers(cls) -> bool:
        """Return whether a field is declared as a number, which describes the whole batch and not its rows."""
        return any(hint in (int, float, bool) for hint in get_type_hints(cls).values())

    def map_packed(self, function: Callable[[Packed], Packed]) -> Self:
        """Return the batch with ``function`` applied to every packed field. Texts and rows are packed first."""
        return self._replace_fields(lambda value: _map_packed(value, function))

    def _replace_fields(self, function: Callable[[Any], Any]) -> Self:
        changed: Self = replace(self, **{name: function(value) for name, value in vars(self).items()})  # type: ignore[type-var]
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {
            name: compress(value) if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        }
        return _restore, (type(self), fields)


def _restore(kind: type[Batch], fields: Mapping[str, Any]) -> Batch:
    return kind(**{name: decompress(value) for name, value in fields.items()})


def _take(value: Any, rows: Rows) -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, Packed | Records):
        return value.take(rows)
    if isinstance(value, Mapping):
        return {name: _take(column, rows) for name, column in value.items()}
    return tuple(value[row] for row in rows) if isinstance(value, Sequence) else value


def _concatenate(values: Sequence[Any], counts: Sequence[int]) -> Any:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, Packed):
        none = np.zeros(0, np.int64)
        values = [
            first.take(none).spread(none, count) if value is None else value
            for value, count in zip(values, counts, strict=True)
        ]
    assert all((value is None) == (first is None) for value in values), "a column is missing in some parts"
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Packed):
        return Packed.concatenate(values)
    if isinstance(first, Mapping):
        return {name: _concatenate([value[name] for value in values], counts) for name in first}
    if all(isinstance(value, Records) for value in values):
        return Records.concatenate(values)
    return tuple(item for value in values for item in value) if isinstance(first, Sequence) else first


def _map_packed(value: Any, function: Callable[[Packed], Packed]) -> Any:
    if isinstance(value, Packed):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map_packed(column, function) for name, column in value.items()}
    if isinstance(value, Sequence):
        records = value if isinstance(value, Records) else Records.from_items(value)
        return Records(function(records.column))
    return value
