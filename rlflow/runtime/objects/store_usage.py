"""The bytes that batches take in each host's object store, and the edge of the graph that each was put for."""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import finalize

from rlflow.batch import Batch
from rlflow.runtime.objects.store import blocks_of

# The edge of the graph that is being produced.
_EDGE: ContextVar[str] = ContextVar("edge", default="")


@contextmanager
def count_towards(name: str) -> Iterator[None]:
    """Count the results of calls inside towards the edge ``name``; within another edge, ``outer/name``."""
    outer = _EDGE.get()
    token = _EDGE.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        _EDGE.reset(token)


def current_edge() -> str:
    """Return the name of the enclosing edge, which is that of a node or a data source; empty outside the graph."""
    return _EDGE.get()


class StoreUsage:
    """The bytes that batches have in each host's store while this process refers to them.

    Methods may be called from any thread.
    """

    def __init__(self, host_names: Mapping[str, str]) -> None:
        """Start with empty stores. ``host_names`` are by the ids of Ray's nodes."""
        self._used: Counter[str] = Counter(dict.fromkeys(host_names.values(), 0))
        self.host_names = host_names
        self._peaks = dict(self._used)
        self._edge_bytes: Counter[str] = Counter()
        # The garbage collector, which may interrupt a thread that has the lock, only adds to this.
        self._freed: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()

    def add(self, result: Any, edge: str) -> None:
        """Count the blocks of a batch that has been put into the stores, until nobody refers to them any more."""
        if not isinstance(result, Batch):
            return
        with self._lock:
            self._subtract_freed()
            for block in blocks_of(result):
                if block.is_counted:
                    continue
                block.is_counted = True
                host = self.host_names.get(block.host, block.host)
                self._used[host] += block.nbytes
                self._peaks[host] = max(self._peaks.get(host, 0), self._used[host])
                self._edge_bytes[edge or "other"] += block.nbytes
                finalize(block, self._freed.append, (host, block.nbytes)).atexit = False

    @property
    def used(self) -> dict[str, int]:
        """Return the bytes that batches have now, by host name."""
        with self._lock:
            self._subtract_freed()
            return dict(self._used)

    @property
    def peaks(self) -> dict[str, int]:
        """Return the most bytes that batches had at a time, by host name."""
        return dict(self._peaks)

    def take_edge_bytes(self) -> dict[str, int]:
        """Return the bytes that were put for each edge since the last call."""
        with self._lock:
            edge_bytes, self._edge_bytes = self._edge_bytes, Counter()
        return dict(edge_bytes)

    def _subtract_freed(self) -> None:
        while self._freed:
            host, nbytes = self._freed.popleft()
            self._used[host] -= nbytes
