"""Packed columns whose values lie in the hosts' object stores of Ray: one object for each producer and field.

Who holds such a column holds references, places and lengths; values come to the process that reads them.
Shapes: T values of all rows together.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlflow.batch import Batch, Packed
from rlflow.errors import EngineError, first_line
from rlflow.packed import Array, Compact, Rows, compact, expanded, offsets_of
from rlflow.runtime.ray.cluster.hosts import quiet_ray

# Of this process, by reference: columns that come in different messages share what they have fetched, and a block is
# counted once.
_BLOCKS: "WeakValueDictionary[Any, Block]" = WeakValueDictionary()


class Block:
    """One array in the store. There is one Block for each in a process."""

    def __init__(self, reference: Any, host: str, count: int, dtype: DTypeLike) -> None:
        """``host``: the id of Ray's node that has it; ``count``: its values."""
        self.reference = reference
        self.host = host
        self.count = count
        self.dtype = np.dtype(dtype)
        self.held = False
        """Whether the budget knows of it."""

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @cached_property
    def values(self) -> Array:
        """[count], mapped and not to be written to. Raises EngineError for what is lost or not as announced."""
        values = fetch(self.reference)
        if not isinstance(values, np.ndarray) or values.shape != (self.count,) or values.dtype != self.dtype:
            found = f"{values.dtype} of {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise EngineError(f"store: a block of {self.count} values of {self.dtype} holds {found}.")
        return values

    def piece(self, start: int, end: int) -> Array:
        """Of its values, without a copy."""
        return self.values[start:end]

    def __reduce__(self) -> tuple[Any, ...]:
        return block_of, (self.reference, self.host, self.count, self.dtype.str)


def block_of(reference: Any, host: str, count: int, dtype: str) -> Block:
    """The one Block of this process for ``reference``."""
    made = Block(reference, host, count, dtype)
    return _BLOCKS.setdefault(reference, made)


def here() -> str:
    """The id of the Ray node that this process is on."""
    host: str = quiet_ray().get_runtime_context().get_node_id()
    return host


def fetch(reference: Any) -> Any:
    """What lies in the store, mapped without a copy. Raises EngineError."""
    ray = quiet_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise EngineError(f"store: a block is lost ({first_line(error)}).") from error


class Places:
    """Where each row of a column lies. Columns that are cut alike share one."""

    def __init__(self, block: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """[rows] each: which block, where in it, how many values."""
        self.block, self.start, self.length = block, start, length
        # The last answers: the sister columns of a batch ask for the same, and get the same object.
        self._taken: tuple[Rows, Places] | None = None
        self._joined: tuple[tuple[Places, ...], list[list[int]], Places] | None = None

    def take(self, rows: Rows) -> "Places":
        if self._taken is None or self._taken[0] is not rows:
            self._taken = (rows, Places(self.block[rows], self.start[rows], self.length[rows]))
        return self._taken[1]

    @staticmethod
    def joined(parts: "tuple[Places, ...]", numbers: list[list[int]]) -> "Places":
        """``numbers``: for each part what its blocks are called in the whole."""
        last = parts[0]._joined
        if last is not None and last[1] == numbers and all(a is b for a, b in zip(last[0], parts, strict=False)):
            return last[2]
        whole = Places(
            np.concatenate([np.asarray(n, np.int64)[part.block] for n, part in zip(numbers, parts, strict=True)]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.length for part in parts]),
        )
        parts[0]._joined = (parts, numbers, whole)
        return whole

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Block, start and end of rows that follow each other there, which can be read in one go."""
        if not len(self.block):
            return []
        ends = self.start + self.length
        new = np.flatnonzero((self.start[1:] != ends[:-1]) | (self.block[1:] != self.block[:-1])) + 1
        first, last = np.append(0, new), np.append(new - 1, len(ends) - 1)
        whole = (self.block[first], self.start[first], ends[last])
        return list(zip(*(each.tolist() for each in whole), strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows that follow each other in a block are 0 apart.
        ends = np.concatenate([[0], (self.start + self.length)[:-1]])
        return _places, (compact(self.block), compact(self.start - ends), compact(self.length))


def _places(block: Compact, gap: Compact, length: Compact) -> Places:
    lengths, gaps = expanded(length), expanded(gap)
    ends = np.cumsum(gaps + lengths)
    return Places(expanded(block), ends - lengths, lengths)


class Pieces(Protocol):
    """Has a part of a block's values."""

    def ask(self) -> None:
        """For them, without waiting."""

    def piece(self, start: int, end: int) -> Array:
        """The block's ``[start:end]``."""


class Stored(Packed):
    """Rows that lie in blocks of the store. Those that are read are copied into one array, once."""

    def __init__(self, blocks: Sequence[Block], places: Places, excerpts: Mapping[int, Pieces] | None = None) -> None:
        """``excerpts``: by the number of a block, what is read in its place in this process."""
        self.blocks = tuple(blocks)
        self.places = places
        self._excerpts = excerpts or {}

    @classmethod
    def of(cls, block: Block, lengths: NDArray[np.int64]) -> "Stored":
        """The rows of one block, one after another."""
        places = Places(np.zeros(len(lengths), np.int64), offsets_of(lengths)[:-1], lengths)
        return cls([block], places)

    @classmethod
    def _joined(cls, parts: Sequence[Any]) -> Packed:
        blocks = {block: None for part in parts for block in part.blocks}
        number = {block: index for index, block in enumerate(blocks)}
        numbers = [[number[block] for block in part.blocks] for part in parts]
        return Stored(list(blocks), Places.joined(tuple(part.places for part in parts), numbers))

    @cached_property
    def values(self) -> Array:
        return self._read(self.places)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return offsets_of(self.places.length)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.places.length

    @property
    def dtype(self) -> "np.dtype[Any]":
        return self.blocks[0].dtype

    def __getitem__(self, row: int) -> Array:
        if "values" in vars(self):
            return super().__getitem__(row)
        one = slice(row, row + 1)
        return self._read(Places(self.places.block[one], self.places.start[one], self.places.length[one]))

    def take(self, rows: Rows) -> "Stored":
        return Stored(self.blocks, self.places.take(rows), self._excerpts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.blocks, self.places)

    def _read(self, places: Places) -> Array:
        for excerpt in self._excerpts.values():
            excerpt.ask()
        pieces = []
        for block, start, end in places.runs:
            if end > self.blocks[block].count:
                raise EngineError("store: rows reach beyond the end of their block.")
            pieces.append(self._excerpts.get(block, self.blocks[block]).piece(start, end))
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


def blocks_of(batch: Batch) -> Sequence[Block]:
    """All that its columns lie in."""
    found: dict[Block, None] = {}

    def note(column: Packed) -> Packed:
        if isinstance(column, Stored):
            found.update(dict.fromkeys(column.blocks))
        return column

    batch.mapped(note)
    return list(found)
