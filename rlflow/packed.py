"""Rows of different lengths in one array, without padding.

Shapes: T values of all rows together.
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
    """Row i is ``values[offsets[i]:offsets[i + 1]]``."""

    def __init__(self, values: Array, offsets: NDArray[np.int64]) -> None:
        self._values = values
        self._offsets = offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | Array], dtype: DTypeLike) -> "Packed":
        arrays = [np.asarray(row, dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return Packed(values, offsets_of(list(map(len, arrays))))

    @staticmethod
    def joined(parts: "Sequence[Packed]") -> "Packed":
        """The rows of all parts, one part after another."""
        kind = type(parts[0])
        return kind._joined(parts) if all(type(part) is kind for part in parts) else Packed._joined(parts)

    @classmethod
    def _joined(cls, parts: "Sequence[Any]") -> "Packed":
        """Of parts that are all of this class."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Packed(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def values(self) -> Array:
        """[T]"""
        return self._values

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[rows + 1], beginning with 0."""
        return self._offsets

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows]"""
        return np.diff(self.offsets)

    def take(self, rows: Rows) -> "Packed":
        """These rows, in this order."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        places = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Packed(self.values[places], offsets)

    def like(self, values: Array) -> "Packed":
        """Other values, ``[T]``, cut at the same places."""
        assert len(values) == self.offsets[-1]
        return Packed(values, self.offsets)


class Repeated(Packed):
    """Values each of which stands for several places in succession: mostly one for all of a row. They are written out
    when they are read.

    Shapes: S values of all rows together, as they are held.
    """

    def __init__(self, each: Array, times: NDArray[np.int64], spans: NDArray[np.int64] | None = None) -> None:
        """``each``, ``times``: [S], the values and for how many places they stand; ``spans``: [rows], how many of them
        a row has, by default one."""
        assert len(each) == len(times)
        self.each = each
        self.times = times
        self.spans = spans

    @classmethod
    def of(cls, column: Packed) -> "Repeated":
        """The same rows."""
        values, offsets = column.values, column.offsets
        is_first = np.ones(len(values), np.bool_)
        is_first[1:] = values[1:] != values[:-1]
        is_first[offsets[offsets < len(values)]] = True
        starts = np.flatnonzero(is_first)
        spans = np.diff(np.searchsorted(starts, offsets))
        return Repeated(values[starts], np.diff(starts, append=len(values)), None if (spans == 1).all() else spans)

    @classmethod
    def _joined(cls, parts: "Sequence[Any]") -> "Packed":
        each, times = (np.concatenate([getattr(part, name) for part in parts]) for name in ("each", "times"))
        if all(part.spans is None for part in parts):
            return Repeated(each, times)
        ones = (np.ones(len(part), np.int64) if part.spans is None else part.spans for part in parts)
        return Repeated(each, times, np.concatenate(list(ones)))

    @property
    def values(self) -> Array:
        return np.repeat(self.each, self.times)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        ends = offsets_of(self.times)
        return ends if self.spans is None else ends[offsets_of(self.spans)]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.times if self.spans is None else np.diff(self.offsets)

    @property
    def sums(self) -> Array:
        """[rows]: of each row's values."""
        sums = self.each * self.times
        return sums if self.spans is None else np.diff(offsets_of(sums)[offsets_of(self.spans)])

    def scaled(self, factors: Array) -> "Repeated":
        """Each row's values times its factor, of ``factors`` [rows]."""
        of_each = factors if self.spans is None else np.repeat(factors, self.spans)
        return Repeated(self.each * of_each, self.times, self.spans)

    def __getitem__(self, row: int) -> Array:
        return self.take(np.array([row])).values

    def take(self, rows: Rows) -> "Repeated":
        if self.spans is None:
            return Repeated(self.each[rows], self.times[rows])
        taken = Packed(np.arange(len(self.each)), offsets_of(self.spans)).take(rows).values
        return Repeated(self.each[taken], self.times[taken], self.spans[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return _repeated, tuple(None if part is None else compact(part) for part in (self.each, self.times, self.spans))


class Records(Sequence[Any]):
    """Texts, or rows of a data set, as bytes in one array: each exists when it is read."""

    def __init__(self, column: Packed) -> None:
        """``column``: rows of uint8, a pickled object each."""
        self.column = column

    @classmethod
    def of(cls, items: Sequence[Any]) -> "Records":
        pieces = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
        values = np.frombuffer(b"".join(pieces), np.uint8)
        return cls(Packed(values, offsets_of([len(piece) for piece in pieces])))

    @classmethod
    def joined(cls, parts: "Sequence[Records]") -> "Records":
        return cls(Packed.joined([part.column for part in parts]))

    def take(self, rows: Rows) -> "Records":
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
    """[rows + 1] from [rows]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


class Compact(NamedTuple):
    """An array in few bytes, for a message."""

    dtype: str
    sent_as: str
    shape: tuple[int, ...]
    content: bytes


def compact(values: Array) -> Compact:
    """Whole numbers in as few bytes as the largest needs; column by column, where runs and repetitions cost nothing."""
    sent = values
    if values.dtype.kind in "iu" and values.size:
        low, high = int(values.min()), int(values.max())
        signed = (np.min_scalar_type(low), np.min_scalar_type(-high - 1))
        sent = values.astype(np.result_type(*signed) if low < 0 else np.min_scalar_type(high))
    return Compact(values.dtype.str, sent.dtype.str, values.shape, zlib.compress(sent.tobytes("F"), 1))


def expanded(value: Any) -> Any:
    """What ``compact`` was given. All else is returned as it is."""
    if not isinstance(value, Compact):
        return value
    sent = np.frombuffer(zlib.decompress(value.content), value.sent_as)
    return sent.reshape(value.shape, order="F").astype(value.dtype, order="C")


def _repeated(*parts: Any) -> Repeated:
    return Repeated(*map(expanded, parts))
