"""Rows of different lengths in one array, without padding.

``Packed`` holds numbers, ``Repeated`` run-length encoded numbers, and ``Records`` any objects.

Shapes: T values in all rows, R runs in all rows.
"""

import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Rows = NDArray[np.integer[Any]]


class Packed:
    """A column of rows with different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``."""

    def __init__(self, values: Array, offsets: NDArray[np.int64]) -> None:
        self._values = values
        self._offsets = offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | Array], dtype: DTypeLike) -> "Packed":
        """Pack rows of any lengths."""
        arrays = [np.asarray(row, dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return Packed(values, offsets_of(list(map(len, arrays))))

    @staticmethod
    def concatenate(parts: "Sequence[Packed]") -> "Packed":
        """Return the rows of all parts, one part after another."""
        kind = type(parts[0])
        return kind._concatenate(parts) if all(type(part) is kind for part in parts) else Packed._concatenate(parts)

    @classmethod
    def _concatenate(cls, parts: "Sequence[Any]") -> "Packed":
        """Concatenate parts that are all of this class."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Packed(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def values(self) -> Array:
        """Return the values of all rows, [T]."""
        return self._values

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return where each row begins, and the end of the last, [rows + 1]."""
        return self._offsets

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of values in each row, [rows]."""
        return np.diff(self.offsets)

    @property
    def is_finite(self) -> bool:
        """Return whether no value is NaN or infinite."""
        return are_finite(self.values)

    def take(self, rows: Rows) -> "Packed":
        """Return these rows, in this order."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        indices = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Packed(self.values[indices], offsets)

    def spread(self, rows: Rows, count: int) -> "Packed":
        """Return ``count`` rows: these at the places ``rows``, which must ascend, and empty rows elsewhere."""
        lengths = np.zeros(count, np.int64)
        lengths[rows] = self.lengths
        return Packed(self.values, offsets_of(lengths))

    def regroup(self, lengths: NDArray[np.int64]) -> "Packed":
        """Return the same values in rows of other lengths, [rows]."""
        assert lengths.sum() == self.offsets[-1]
        return Packed(self.values, offsets_of(lengths))

    def like(self, values: Array) -> "Packed":
        """Return other values, [T], in rows of the same lengths."""
        assert len(values) == self.offsets[-1]
        return Packed(values, self.offsets)


def are_finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite."""
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


class Repeated(Packed):
    """A run-length encoded column, mostly with one run for each row. Reading ``values`` decodes it.

    Shapes: R runs in all rows.
    """

    def __init__(
        self, run_values: Array, run_lengths: NDArray[np.int64], runs_per_row: NDArray[np.int64] | None = None
    ) -> None:
        """Create a column of runs: ``run_values``, ``run_lengths`` [R]; ``runs_per_row`` [rows], by default one."""
        assert len(run_values) == len(run_lengths)
        self.run_values = run_values
        self.run_lengths = run_lengths
        self.runs_per_row = runs_per_row

    @classmethod
    def from_packed(cls, column: Packed) -> "Repeated":
        """Encode each row of ``column`` as runs of equal values."""
        values, offsets = column.values, column.offsets
        is_first = np.ones(len(values), np.bool_)
        is_first[1:] = values[1:] != values[:-1]
        is_first[offsets[offsets < len(values)]] = True
        starts = np.flatnonzero(is_first)
        runs_per_row = np.diff(np.searchsorted(starts, offsets))
        run_lengths = np.diff(starts, append=len(values))
        return Repeated(values[starts], run_lengths, None if (runs_per_row == 1).all() else runs_per_row)

    @classmethod
    def _concatenate(cls, parts: "Sequence[Any]") -> "Packed":
        run_values = np.concatenate([part.run_values for part in parts])
        run_lengths = np.concatenate([part.run_lengths for part in parts])
        if all(part.runs_per_row is None for part in parts):
            return Repeated(run_values, run_lengths)
        counts = [np.ones(len(part), np.int64) if part.runs_per_row is None else part.runs_per_row for part in parts]
        return Repeated(run_values, run_lengths, np.concatenate(counts))

    @property
    def values(self) -> Array:
        return np.repeat(self.run_values, self.run_lengths)

    @property
    def is_finite(self) -> bool:
        return are_finite(self.run_values)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        ends = offsets_of(self.run_lengths)
        return ends if self.runs_per_row is None else ends[offsets_of(self.runs_per_row)]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.run_lengths if self.runs_per_row is None else np.diff(self.offsets)

    @property
    def sums(self) -> Array:
        """Return the sum of each row's values, [rows]."""
        sums = self.run_values * self.run_lengths
        return sums if self.runs_per_row is None else np.diff(offsets_of(sums)[offsets_of(self.runs_per_row)])

    def scale(self, factors: Array) -> "Repeated":
        """Multiply each row by its factor, ``factors`` [rows]."""
        run_factors = factors if self.runs_per_row is None else np.repeat(factors, self.runs_per_row)
        return Repeated(self.run_values * run_factors, self.run_lengths, self.runs_per_row)

    def __getitem__(self, row: int) -> Array:
        return self.take(np.array([row])).values

    def take(self, rows: Rows) -> "Repeated":
        if self.runs_per_row is None:
            return Repeated(self.run_values[rows], self.run_lengths[rows])
        taken = Packed(np.arange(len(self.run_values)), offsets_of(self.runs_per_row)).take(rows).values
        return Repeated(self.run_values[taken], self.run_lengths[taken], self.runs_per_row[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return _decompress_repeated, tuple(
            None if part is None else compress(part) for part in (self.run_values, self.run_lengths, self.runs_per_row)
        )


class Records(Sequence[Any]):
    """Texts, or rows of a data set, pickled into one array. Reading an item unpickles it."""

    def __init__(self, column: Packed) -> None:
        """Create records from a column of uint8 with one pickled object in each row."""
        self.column = column

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> "Records":
        """Pickle each item."""
        pieces = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
        values = np.frombuffer(b"".join(pieces), np.uint8)
        return cls(Packed(values, offsets_of([len(piece) for piece in pieces])))

    @classmethod
    def concatenate(cls, parts: "Sequence[Records]") -> "Records":
        """Return the items of all parts, one part after another."""
        return cls(Packed.concatenate([part.column for part in parts]))

    def take(self, rows: Rows) -> "Records":
        """Return the items of these rows, in this order."""
        return Records(self.column.take(rows))

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return pickle.loads(self.column[row % len(self)].tobytes())

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return offsets [rows + 1] for lengths [rows]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


class CompressedArray(NamedTuple):
    """An array in few bytes, to be sent in a message."""

    dtype: str
    sent_dtype: str
    shape: tuple[int, ...]
    content: bytes


def compress(values: Array) -> CompressedArray:
    """Compress an array: integers in the smallest dtype that holds them, stored by columns, where repetitions are."""
    sent = values
    if values.dtype.kind in "iu" and values.size:
        low, high = int(values.min()), int(values.max())
        signed = (np.min_scalar_type(low), np.min_scalar_type(-high - 1))
        sent = values.astype(np.result_type(*signed) if low < 0 else np.min_scalar_type(high))
    return CompressedArray(values.dtype.str, sent.dtype.str, values.shape, zlib.compress(sent.tobytes("F"), 1))


def decompress(value: Any) -> Any:
    """Return the array that was compressed; any other value is returned unchanged."""
    if not isinstance(value, CompressedArray):
        return value
    sent = np.frombuffer(zlib.decompress(value.content), value.sent_dtype)
    return sent.reshape(value.shape, order="F").astype(value.dtype, order="C")


def _decompress_repeated(*parts: Any) -> Repeated:
    return Repeated(*map(decompress, parts))
