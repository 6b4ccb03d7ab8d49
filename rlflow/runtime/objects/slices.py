"""Rows of a batch on their way to a worker. The batch travels once; each worker gets the numbers of its rows beside it.

When the rows lie on another host than their reader, only they are copied, not the blocks around them. One process on
each host cuts them out; the first reader starts it, and it ends with that reader.
"""

import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Packed
from rlflow.batch.packed import Array, CompressedArray, Rows, compress, decompress, offsets_of
from rlflow.runtime.objects.ray_api import import_ray, this_host
from rlflow.runtime.objects.store import Block, RowSpans, StoredColumn, blocks_of, cut, fetch

# Slicing must leave at least this many bytes where they are, to be worth its message.
_MIN_SAVED_BYTES = 1 << 20
# Seconds for which a slice stays available to others who ask for the same.
_SHARED_S = 5.0
# The longest wait for values to be cut out, and to travel. Then the whole block is fetched, without that process.
_CUT_S = 120.0

Intervals = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Starts and ends [intervals] of the values of a block that are read, in order and disjoint."""

BatchT = TypeVar("BatchT", bound=Batch)


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """A batch of which several workers get slices."""

    batch: Batch

    def slice(self, rows: Rows) -> "BatchSlice":
        return BatchSlice(self, rows)

    @cached_property
    def reference(self) -> Any:
        """Put a copy of the batch into the store, once, and return the reference to it."""
        return import_ray().put(self.batch)


@dataclass(frozen=True, eq=False)
class BatchSlice:
    """Some rows of a batch."""

    shared: SharedBatch
    rows: Rows

    @property
    def batch(self) -> Batch:
        return self.shared.batch.take(self.rows)

    def to_message(self) -> "SliceMessage":
        """Return what is sent to a worker in place of the rows themselves."""
        return SliceMessage([self.shared.reference], compress(self.rows.astype(np.int64)))


@dataclass(frozen=True)
class SliceMessage:
    """A reference to a batch, and the rows of it that the receiver works on."""

    reference: list[Any]
    """One reference, in a list: Ray passes it on without fetching the object."""
    rows: CompressedArray


def open_message(argument: Any) -> Any:
    """Return a batch, or the rows of a SliceMessage, to be read on this host, and any other argument as it is."""
    if isinstance(argument, Batch):
        return localize(argument, this_host())
    if not isinstance(argument, SliceMessage):
        return argument
    batch: Batch = fetch(argument.reference[0])
    return localize(batch.take(decompress(argument.rows)), this_host())


def localize(batch: BatchT, host: str) -> BatchT:
    """Return the same batch for a reader on ``host``, which fetches only the rows in it from other hosts.

    What it reads from another host comes in one object, the values of all columns together.
    """
    if all(block.host == host for block in blocks_of(batch)):
        return batch
    known: dict[tuple[RowSpans, int], Intervals] = {}
    slices: dict[str, HostSlice] = {}

    def local(column: Packed) -> Packed:
        return _localize_column(column, host, known, slices) if isinstance(column, StoredColumn) else column

    return batch.map_packed(local)


def _localize_column(
    column: StoredColumn, host: str, known: dict[tuple[RowSpans, int], Intervals], slices: "dict[str, HostSlice]"
) -> StoredColumn:
    readers: dict[int, BlockSlice] = {}
    for index, block in enumerate(column.blocks):
        if block.host == host or block.nbytes < _MIN_SAVED_BYTES:
            continue
        key = (column.spans, index)
        if key not in known:
            known[key] = _intervals(column.spans, index)
        starts, ends = known[key]
        read = int((ends - starts).sum())
        saved_bytes = (block.count - read) * block.dtype.itemsize
        if read > 0 and saved_bytes >= _MIN_SAVED_BYTES and ends[-1] <= block.count:
            readers[index] = BlockSlice(slices.setdefault(block.host, HostSlice(block.host)), block, known[key])
    return StoredColumn(column.blocks, column.spans, readers)


def _intervals(spans: RowSpans, block: int) -> Intervals:
    """Return the intervals of a block that some row covers."""
    rows = (spans.block == block) & (spans.length > 0)
    order = np.argsort(spans.start[rows], kind="stable")
    starts, ends = spans.start[rows][order], (spans.start + spans.length)[rows][order]
    # A row may occur more than once.
    first = np.append(True, starts[1:] > np.maximum.accumulate(ends)[:-1])[: len(starts)]
    return starts[first], ends[np.append(first[1:], True)[: len(ends)]]


class HostSlice:
    """The values of several blocks on one other host that are read here, cut out there and fetched together."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._blocks: list[Block] = []
        self._intervals: list[Intervals] = []
        """All different intervals; the columns of a batch share theirs."""
        self._numbers: list[int] = []
        """The index of each block's intervals."""
        self._slicer: Any = None
        self._pending: Any = None
        """A reference to the reference of the values."""

    def add(self, block: Block, intervals: Intervals) -> int:
        """Add intervals of a block, before anything is requested. Return the index of their values."""
        number = next((at for at, known in enumerate(self._intervals) if known is intervals), len(self._intervals))
        if number == len(self._intervals):
            self._intervals.append(intervals)
        self._blocks.append(block)
        self._numbers.append(number)
        return len(self._blocks) - 1

    def request(self) -> None:
        """Request the values without waiting for them."""
        # Ray raises ValueError for a named actor that it can neither find nor create.
        with suppress(import_ray().exceptions.RayError, ValueError):
            if self._pending is None:
                references = [block.reference for block in self._blocks]
                self._slicer = _slicer_on(self._host)
                self._pending = self._slicer.cut.remote(references, self._numbers, self._intervals)

    @cached_property
    def values(self) -> Sequence[Array] | None:
        """Return the values of each block; None when they cannot be cut out, so that whole blocks are fetched."""
        ray = import_ray()
        self.request()
        if self._pending is None:
            return None
        try:
            values: Sequence[Array] = ray.get(self._reference(), timeout=_CUT_S)
        except ray.exceptions.RayError:
            _slicer_on.cache_clear()
            return None
        return values

    def _reference(self) -> Any:
        """Return the reference of the values, once they are cut out. Raises RayError."""
        ray = import_ray()
        try:
            return ray.get(self._pending, timeout=_CUT_S)[0]
        except ray.exceptions.GetTimeoutError:
            # It may be stopped. Others get a new one, under the same name.
            ray.kill(self._slicer)
            raise


class BlockSlice:
    """The values of a block that are read here, cut out on the block's host."""

    def __init__(self, source: HostSlice, block: Block, intervals: Intervals) -> None:
        self._source = source
        self._index = source.add(block, intervals)
        self._block = block
        self._starts, ends = intervals
        self._offsets = offsets_of(ends - self._starts)

    def request(self) -> None:
        """Request the values without waiting for them."""
        self._source.request()

    def read(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Array]:
        """Return the block's values ``[start:end]`` for each pair. Raises EngineError for a block that is lost."""
        values = self._values
        if values is None:
            return self._block.read(starts, ends)
        intervals = np.searchsorted(self._starts, starts, "right") - 1
        moved = self._offsets[intervals] - self._starts[intervals]
        return cut(values, starts + moved, ends + moved)

    @cached_property
    def _values(self) -> Array | None:
        """Return the values of all intervals; None when the whole block has to be fetched."""
        values = self._source.values
        if values is None:
            return None
        selected = values[self._index]
        return selected if selected.shape == (self._offsets[-1],) and selected.dtype == self._block.dtype else None


class Slicer:
    """An actor on the host of the blocks that cuts values out of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: dict[bytes, Any] = {}

    def cut(self, references: list[Any], numbers: Sequence[int], intervals: Sequence[Intervals]) -> list[Any]:
        """Return a reference to a list with the values of each of ``references``, arrays on this host.

        ``numbers`` says for each array which of ``intervals`` to cut out. Ranks that share sequences ask for the same
        at the same time. They get the same reference, so that the values travel once to each host.
        """
        ray = import_ray()
        # Not by the references themselves: they would keep blocks in the store that all others have released.
        key = pickle.dumps(([reference.hex() for reference in references], list(numbers), list(intervals)))
        with self._lock:
            if key not in self._slices:
                arrays = zip(ray.get(references), numbers, strict=True)
                self._slices[key] = ray.put([np.concatenate(cut(array, *intervals[at])) for array, at in arrays])
                forget = threading.Timer(_SHARED_S, self._slices.pop, [key, None])
                forget.daemon = True
                forget.start()
            return [self._slices[key]]


@cache
def _slicer_on(host: str) -> Any:
    """Return the Slicer of a host, started on first use."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: Mapping[str, Any] = {
        "name": f"slicer-{host}",
        "get_if_exists": True,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(host, soft=False),
    }
    return import_ray().remote(Slicer).options(**options).remote()
