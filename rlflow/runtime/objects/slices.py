"""Rows that are read on another host than they lie on: only they travel, and not the blocks that they lie in.

A process there, one a host, cuts them out. It ends with the first who asks, who starts it.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Packed
from rlflow.packed import Array, offsets_of
from rlflow.runtime.objects.store import Block, Places, Stored, blocks_of
from rlflow.runtime.ray.cluster.hosts import quiet_ray

# Bytes that stay where they are, at least, for a cut to be worth its message.
_WORTH = 1 << 20
# For how long others may ask for the same.
_SHARED_S = 5.0

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""[spans] each: starts and ends of what is read of a block, in order and apart from each other."""

Of = TypeVar("Of", bound=Batch)


class Cutter:
    """On the host of the blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cuts: dict[tuple[str, bytes, bytes], Any] = {}

    def cut(self, reference: list[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Any]:
        """``reference``: one, to an array on this host. Gives one to what is cut out: the same to ranks that share
        sequences, which ask at the same time, so that it travels once to each host."""
        ray = quiet_ray()
        # Not by the reference: a block that all others have released would stay in the store.
        key = (reference[0].hex(), starts.tobytes(), ends.tobytes())
        with self._lock:
            if key not in self._cuts:
                values = ray.get(reference[0])
                spans = zip(starts.tolist(), ends.tolist(), strict=True)
                self._cuts[key] = ray.put(np.concatenate([values[start:end] for start, end in spans]))
                forget = threading.Timer(_SHARED_S, self._cuts.pop, [key, None])
                forget.daemon = True
                forget.start()
            return [self._cuts[key]]


class Excerpt:
    """Of a block."""

    def __init__(self, block: Block, spans: Spans) -> None:
        self._block = block
        self._starts, ends = spans
        self._ends = ends
        self._offsets = offsets_of(ends - self._starts)
        self._asked: Any = None

    def ask(self) -> None:
        """For what ``piece`` waits for."""
        # Ray raises ValueError for a name that it can neither find nor give.
        with suppress(quiet_ray().exceptions.RayError, ValueError):
            if self._asked is None:
                self._asked = _cutter(self._block.host).cut.remote([self._block.reference], self._starts, self._ends)

    def piece(self, start: int, end: int) -> Array:
        """Raises EngineError for a block that is lost."""
        values = self._values
        if values is None:
            return self._block.piece(start, end)
        span = int(np.searchsorted(self._starts, start, "right")) - 1
        place = int(self._offsets[span]) + start - int(self._starts[span])
        return values[place : place + end - start]

    @cached_property
    def _values(self) -> Array | None:
        """None where they cannot be cut out: then the block is fetched."""
        ray = quiet_ray()
        self.ask()
        if self._asked is None:
            return None
        try:
            values: Array = ray.get(ray.get(self._asked)[0])
        except ray.exceptions.RayError:
            _cutter.cache_clear()
            return None
        return values if values.shape == (self._offsets[-1],) and values.dtype == self._block.dtype else None


def near(batch: Of, host: str) -> Of:
    """The same, to be read on ``host``."""
    if all(block.host == host for block in blocks_of(batch)):
        return batch
    known: dict[tuple[Places, int], Spans] = {}

    def excerpts(column: Packed) -> Packed:
        return _near(column, host, known) if isinstance(column, Stored) else column

    return batch.mapped(excerpts)


def _near(column: Stored, host: str, known: dict[tuple[Places, int], Spans]) -> Stored:
    found: dict[int, Excerpt] = {}
    for index, block in enumerate(column.blocks):
        if block.host == host or block.nbytes < _WORTH:
            continue
        key = (column.places, index)
        if key not in known:
            known[key] = _spans(column.places, index)
        starts, ends = known[key]
        read = int((ends - starts).sum())
        if read > 0 and (block.count - read) * block.dtype.itemsize >= _WORTH and ends[-1] <= block.count:
            found[index] = Excerpt(block, known[key])
    return Stored(column.blocks, column.places, found)


def _spans(places: Places, block: int) -> Spans:
    rows = (places.block == block) & (places.length > 0)
    order = np.argsort(places.start[rows], kind="stable")
    starts, ends = places.start[rows][order], (places.start + places.length)[rows][order]
    # A row may be there more than once.
    first = np.append(True, starts[1:] > np.maximum.accumulate(ends)[:-1])[: len(starts)]
    return starts[first], ends[np.append(first[1:], True)[: len(ends)]]


@cache
def _cutter(host: str) -> Any:
    """That of a host."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: Mapping[str, Any] = {
        "name": f"cutter-{host}",
        "get_if_exists": True,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(host, soft=False),
    }
    return quiet_ray().remote(Cutter).options(**options).remote()
