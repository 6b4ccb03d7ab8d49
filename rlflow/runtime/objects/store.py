"""Packed columns whose values lie in the hosts' object stores of Ray: one object for each producer and field.

A process that has such a column has references to blocks and the span of each row in them. Values are fetched into the
process that reads them.
Shapes: T values of all rows together.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlflow.batch import Batch, Packed, Sequences
from rlflow.batch.packed import Array, CompressedArray, Rows, are_finite, compress, decompress, offsets_of
from rlflow.errors import EngineError, first_line
from rlflow.runtime.objects.ray_api import import_ray, this_host

# The blocks that this process knows, by reference. Columns that arrive in different messages share what they fetch, and
# each block is counted once.
_BLOCKS: "WeakValueDictionary[Any, Block]" = WeakValueDictionary()


class Block:
    """One array in an object store. A process has one Block for each."""

    def __init__(self, reference: Any, host: str, count: int, dtype: DTypeLike, is_finite: bool = True) -> None:
        """Describe the array of ``count`` values behind ``reference``, in the store of the Ray node ``host``.

        ``is_finite`` says that none of them is NaN or infinite, so that nobody needs to read them to know.
        """
        self.reference = reference
        self.host = host
        self.count = count
        self.dtype = np.dtype(dtype)
        self.is_finite = is_finite
        self.is_counted = False
        """``StoreUsage`` counts the block's bytes until the block goes."""

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @cached_property
    def values(self) -> Array:
        """Return the values [count], mapped and read-only. Raises EngineError for an object that is lost or differs."""
        values = fetch(self.reference)
        if not isinstance(values, np.ndarray) or values.shape != (self.count,) or values.dtype != self.dtype:
            kind = f"{values.dtype} of {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise EngineError(f"object store: expected a block of {self.count} values of {self.dtype}, got {kind}.")
        return values

    def read(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Array]:
        """Return the values ``[start:end]`` for each pair, without a copy."""
        return cut(self.values, starts, ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return block_for, (self.reference, self.host, self.count, self.dtype.str, self.is_finite)


def block_for(reference: Any, host: str, count: int, dtype: str, is_finite: bool = True) -> Block:
    """Return this process's one Block for ``reference``."""
    return _BLOCKS.setdefault(reference, Block(reference, host, count, dtype, is_finite))


def cut(values: Array, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Array]:
    """Return ``values[start:end]`` for each pair."""
    return [values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def put_array(values: Array) -> Block:
    """Copy an array into the store of this host."""
    return block_for(import_ray().put(values), this_host(), len(values), values.dtype.str, are_finite(values))


def fetch(reference: Any) -> Any:
    """Return an object of the store, mapped without a copy. Raises EngineError for one that is lost."""
    ray = import_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise EngineError(f"object store: a block is lost ({first_line(error)}).") from error


class RowSpans:
    """The place of each row of a column in its blocks. Columns with rows of the same lengths share one."""

    def __init__(self, block: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """Take for each row [rows] the index of its block, its start in the block, and its number of values."""
        self.block, self.start, self.length = block, start, length
        # The last results: the sister columns of a batch ask for the same, and must get the same object.
        self._last_take: tuple[Rows, RowSpans] | None = None
        self._last_join: tuple[tuple[RowSpans, ...], list[list[int]], RowSpans] | None = None

    def take(self, rows: Rows) -> "RowSpans":
        last = self._last_take
        if last is None or last[0] is not rows:
            last = self._last_take = (rows, RowSpans(self.block[rows], self.start[rows], self.length[rows]))
        return last[1]

    @staticmethod
    def joined(parts: "tuple[RowSpans, ...]", numbers: list[list[int]]) -> "RowSpans":
        """Concatenate ``parts``. ``numbers`` lists for each part the indices that its blocks have in the result."""
        last = parts[0]._last_join
        if last is not None and last[1] == numbers and all(a is b for a, b in zip(last[0], parts, strict=False)):
            return last[2]
        result = RowSpans(
            np.concatenate([np.asarray(n, np.int64)[part.block] for n, part in zip(numbers, parts, strict=True)]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.length for part in parts]),
        )
        parts[0]._last_join = (parts, numbers, result)
        return result

    @cached_property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks, starts and ends of the runs of adjacent rows, each of which can be read in one go."""
        ends = self.start + self.length
        is_new = (self.start[1:] != ends[:-1]) | (self.block[1:] != self.block[:-1])
        first = np.append(True, is_new)[: len(ends)]
        return self.block[first], self.start[first], ends[np.append(is_new, True)[: len(ends)]]

    def __reduce__(self) -> tuple[Any, ...]:
        # Adjacent rows have gaps of 0, which take no room in a message.
        ends = np.concatenate([[0], (self.start + self.length)[:-1]])
        return _unpickle_spans, (compress(self.block), compress(self.start - ends), compress(self.length))


def _unpickle_spans(block: CompressedArray, gap: CompressedArray, length: CompressedArray) -> RowSpans:
    lengths, gaps = decompress(length), decompress(gap)
    ends = np.cumsum(gaps + lengths)
    return RowSpans(decompress(block), ends - lengths, lengths)


class BlockReader(Protocol):
    """A source of some of a block's values."""

    def request(self) -> None:
        """Request the values without waiting for them."""

    def read(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Array]:
        """Return the block's values ``[start:end]`` for each pair."""


class StoredColumn(Packed):
    """A column whose rows lie in blocks of the store. The rows that are read are copied into one array, once."""

    def __init__(self, blocks: Sequence[Block], spans: RowSpans, readers: Mapping[int, BlockReader] | None = None):
        """Take the blocks and the rows' spans in them; ``readers`` replace blocks, by index, in this process."""
        self.blocks = tuple(blocks)
        self.spans = spans
        self._readers = readers or {}

    @classmethod
    def of(cls, block: Block, lengths: NDArray[np.int64]) -> "StoredColumn":
        """Return a column of the adjacent rows of one block."""
        return cls([block], RowSpans(np.zeros(len(lengths), np.int64), offsets_of(lengths)[:-1], lengths))

    @classmethod
    def _concatenate(cls, parts: Sequence[Any]) -> Packed:
        blocks = {block: None for part in parts for block in part.blocks}
        number = {block: index for index, block in enumerate(blocks)}
        numbers = [[number[block] for block in part.blocks] for part in parts]
        return StoredColumn(list(blocks), RowSpans.joined(tuple(part.spans for part in parts), numbers))

    @cached_property
    def values(self) -> Array:
        return self._read(self.spans)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return offsets_of(self.spans.length)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.spans.length

    @property
    def is_finite(self) -> bool:
        """Return whether no value of its blocks is NaN or infinite, as the processes said that put them."""
        return all(block.is_finite for block in self.blocks)

    @property
    def dtype(self) -> "np.dtype[Any]":
        return self.blocks[0].dtype

    def __getitem__(self, row: int) -> Array:
        if "values" in vars(self):
            return super().__getitem__(row)
        one = slice(row, row + 1)
        return self._read(RowSpans(self.spans.block[one], self.spans.start[one], self.spans.length[one]))

    def take(self, rows: Rows) -> "StoredColumn":
        return StoredColumn(self.blocks, self.spans.take(rows), self._readers)

    def spread(self, rows: Rows, count: int) -> "StoredColumn":
        block, start, length = np.zeros((3, count), np.int64)
        block[rows], start[rows], length[rows] = self.spans.block, self.spans.start, self.spans.length
        return StoredColumn(self.blocks, RowSpans(block, start, length), self._readers)

    def with_used_blocks(self) -> "StoredColumn":
        """Return the column with references only to the blocks that its rows lie in, so that the others can go."""
        used, numbers = np.unique(self.spans.block, return_inverse=True)
        if not 0 < len(used) < len(self.blocks):
            return self
        spans = RowSpans(numbers, self.spans.start, self.spans.length)
        return StoredColumn([self.blocks[number] for number in used.tolist()], spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredColumn, (self.blocks, self.spans)

    def _read(self, spans: RowSpans) -> Array:
        for reader in self._readers.values():
            reader.request()
        blocks, starts, ends = spans.runs
        if (ends > np.array([block.count for block in self.blocks])[blocks]).any():
            raise EngineError("object store: rows reach beyond the end of their block.")
        pieces: list[Array] = [np.empty(0, self.dtype)] * len(blocks)
        for block in np.unique(blocks).tolist():
            runs = np.flatnonzero(blocks == block)
            values = self._readers.get(block, self.blocks[block]).read(starts[runs], ends[runs])
            for run, piece in zip(runs.tolist(), values, strict=True):
                pieces[run] = piece
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


def blocks_of(batch: Batch) -> Sequence[Block]:
    """Return all blocks that the columns of a batch lie in."""
    blocks: dict[Block, None] = {}

    def note(column: Packed) -> Packed:
        if isinstance(column, StoredColumn):
            blocks.update(dict.fromkeys(column.blocks))
        return column

    batch.map_packed(note)
    return list(blocks)


def host_of(sequences: Sequences) -> str | None:
    """Return the host of the first response, by the id of its Ray node; None for responses in this process."""
    column = sequences.response_ids
    return column.blocks[column.spans.block[0]].host if isinstance(column, StoredColumn) and len(column) else None
