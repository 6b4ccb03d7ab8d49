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
    """One value a row, which stands for each of its places. The values exist when they are read."""

    def __init__(self, each: Array, lengths: NDArray[np.int64]) -> None:
        """``each``: [rows]."""
        assert len(each) == len(lengths)
        self.each = each
        self._lengths = lengths

    @classmethod
    def _joined(cls, parts: "Sequence[Any]") -> "Packed":
        return Repeated(np.concatenate([part.each for part in parts]), np.concatenate([part.lengths for part in parts]))

    @property
    def values(self) -> Array:
        return np.repeat(self.each, self._lengths)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return offsets_of(self._lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def __getitem__(self, row: int) -> Array:
        return np.repeat(self.each[row], self._lengths[row])

    def take(self, rows: Rows) -> "Repeated":
        return Repeated(self.each[rows], self._lengths[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return _repeated, (compact(self.each), compact(self._lengths))


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


def _repeated(each: Compact, lengths: Compact) -> Repeated:
    return Repeated(expanded(each), expanded(lengths))
