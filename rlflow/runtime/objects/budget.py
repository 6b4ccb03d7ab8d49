"""A budget for each host's object store: a worker that wants to put a result there waits until there is room.

Also how much of a store batches may take, and whether that is enough for a plan.
"""

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError, PlacementError
from rlflow.nodes.generate import Generate
from rlflow.resources.layout import GIB
from rlflow.runtime.objects.ray_api import import_ray

# The part of a host's store that batches may take. The rest is for slices that readers on other hosts fetch, for what
# readers here fetch from other hosts, for objects that Ray frees a second late, and for weights on their way.
_SHARE = 0.5
# Bytes of a token of a rollout: its id, its logprob and its text.
_TOKEN_BYTES = 12

# The edge of the graph that is being produced. What is put into a store meanwhile counts towards it.
_EDGE: ContextVar[str] = ContextVar("edge", default="")


@contextmanager
def edge(name: str) -> Iterator[None]:
    """Count the results of calls inside towards the edge ``name``; within another edge, ``outer/name``."""
    outer = _EDGE.get()
    token = _EDGE.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        _EDGE.reset(token)


def current_edge() -> str:
    """Return the name of the enclosing edge."""
    return _EDGE.get() or "other"


def current_node() -> str:
    """Return the name of the node whose output is being produced; empty outside the graph."""
    return _EDGE.get()


@dataclass(frozen=True)
class StoreLimit:
    """The room for batches in the store of one host."""

    name: str
    """The host's name, for messages."""
    nbytes: int
    """The bytes that batches may take."""


def store_limits() -> Mapping[str, StoreLimit]:
    """Return the limit of each live host, by the id of its Ray node."""
    return {
        node["NodeID"]: StoreLimit(node["NodeName"], int(_SHARE * node["Resources"].get("object_store_memory", 0)))
        for node in import_ray().nodes()
        if node["Alive"]
    }


def check_limits(plan: Plan, limits: Mapping[str, StoreLimit]) -> None:
    """Raise PlacementError for a step, or a single sample, that does not fit.

    ``limits`` are by the names of the plan's hosts.
    """
    fix = "give Ray more with --object-store-memory, or make {} smaller"
    least = min(limits.values(), key=lambda limit: limit.nbytes)
    for node in plan.graph.nodes:
        if isinstance(node.operation, Generate):
            longest = node.operation.max_tokens * _TOKEN_BYTES
            if longest > least.nbytes:
                raise PlacementError(
                    f"graph.{node.name}.max_tokens",
                    f"a response of {node.operation.max_tokens} tokens is {longest / GIB:.2f} GiB, and batches may take"
                    f" {least.nbytes / GIB:.2f} GiB of the object store of {least.name}",
                    fix=fix.format("max_tokens"),
                )
    for host, gib in plan.prediction.data.store_peak_gib.items():
        if host in limits and gib * GIB > limits[host].nbytes:
            raise PlacementError(
                "data.batch_size",
                f"a step is predicted to need {gib:.2f} GiB of the object store of {host} at once, and batches may"
                f" take {limits[host].nbytes / GIB:.2f} GiB of it",
                fix=fix.format("batch_size, group_size or max_tokens"),
            )


@dataclass
class _Usage:
    """The bytes that batches have in the store of one host."""

    used: int = 0
    peak: int = 0
    by_edge: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class _Request:
    """A request for room in a host's store."""

    host: str
    edge: str
    nbytes: int
    granted: "Future[None]" = field(default_factory=Future)


class Budget:
    """The bytes that batches have and may have in each host's store.

    Requests are granted in the order in which they come. Only running calls can lead to a release: when all of them
    wait for room, none will ever come, and all waiting requests fail.

    Methods may be called from any thread. ``release`` may even interrupt another method in its own thread, since the
    garbage collector calls it.
    """

    def __init__(self, limits: Mapping[str, StoreLimit]) -> None:
        """Start with empty stores. ``limits`` are by host id."""
        self.limits = limits
        self._usage = {host: _Usage() for host in limits}
        self._edge_bytes: Counter[str] = Counter()
        self._waiting: list[_Request] = []
        self._running = 0
        self._patient: Collection[str] = ()
        # Queued without the lock, which may be held by the very thread that a release interrupts.
        self._events: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def begin_call(self) -> None:
        """Note that a call runs, until ``end_call``."""
        self._process(lambda: self._count(1))

    def end_call(self) -> None:
        self._process(lambda: self._count(-1))

    def reserve(self, host: str, nbytes: int, edge: str) -> "Future[None]":
        """Return a future that is done when there is room. It raises EngineError when there will be none."""
        request = _Request(host, edge, nbytes)
        self._process(lambda: self._waiting.append(request))
        return request.granted

    def release(self, host: str, nbytes: int, edge: str) -> None:
        """Give reserved bytes back."""
        self._process(lambda: self._add(host, edge, -nbytes))

    def release_with(self, owner: Any, host: str, nbytes: int, edge: str) -> None:
        """Give reserved bytes back when ``owner`` is garbage-collected."""
        finalize(owner, self.release, host, nbytes, edge).atexit = False

    def expect_release(self, edges: Collection[str]) -> None:
        """Let requests for these edges wait: room will be freed although no call runs. Replaces earlier edges."""
        self._process(lambda: setattr(self, "_patient", edges))

    @property
    def peaks(self) -> dict[str, int]:
        """Return the most bytes that batches had at a time, by host name."""
        return {limit.name: self._usage[host].peak for host, limit in self.limits.items()}

    @property
    def used(self) -> dict[str, int]:
        """Return the bytes that batches have now, by host name."""
        return {limit.name: self._usage[host].used for host, limit in self.limits.items()}

    def drain_edge_bytes(self) -> dict[str, int]:
        """Return the bytes that were put for each edge since the last call."""
        by_edge, self._edge_bytes = self._edge_bytes, Counter()
        return dict(by_edge)

    def _process(self, event: Callable[[], None]) -> None:
        """Queue an event and process all queued ones, unless another thread does so already."""
        self._events.append(event)
        # The thread that has the lock looks at the queue again after releasing it, so no event is left behind.
        while self._events and self._lock.acquire(blocking=False):
            decided: list[tuple[Future[None], EngineError | None]] = []
            try:
                while self._events:
                    self._events.popleft()()
                decided = self._decide()
            finally:
                self._lock.release()
            for granted, error in decided:
                granted.set_exception(error) if error else granted.set_result(None)

    def _count(self, change: int) -> None:
        self._running += change

    def _add(self, host: str, edge: str, nbytes: int) -> None:
        usage = self._usage[host]
        usage.used += nbytes
        usage.by_edge[edge] += nbytes
        usage.peak = max(usage.peak, usage.used)
        if nbytes > 0:
            self._edge_bytes[edge] += nbytes

    def _decide(self) -> "list[tuple[Future[None], EngineError | None]]":
        """Return the requests that are now granted, or fail with an error."""
        decided: list[tuple[Future[None], EngineError | None]] = []
        full: set[str] = set()
        for request in list(self._waiting):
            limit = self.limits[request.host].nbytes
            fits = self._usage[request.host].used + request.nbytes <= limit
            if fits and request.host not in full:
                self._add(request.host, request.edge, request.nbytes)
                decided.append((request.granted, None))
                self._waiting.remove(request)
            elif request.nbytes > limit:
                decided.append((request.granted, self._full(request)))
                self._waiting.remove(request)
            else:
                full.add(request.host)
        if self._waiting and len(self._waiting) >= self._running:
            gc.collect()  # unreachable cycles may still refer to blocks
            if self._events:
                return decided
            failing = [request for request in self._waiting if request.edge not in self._patient]
            decided += [(request.granted, self._full(request)) for request in failing]
            self._waiting = [request for request in self._waiting if request not in failing]
        return decided

    def _full(self, request: _Request) -> EngineError:
        limit, usage = self.limits[request.host], self._usage[request.host]
        in_use = ", ".join(f"{edge} {_mib(size)}" for edge, size in usage.by_edge.most_common() if size > 0)
        return EngineError(
            f"object store of {limit.name}: {request.edge} needs {_mib(request.nbytes)} of the {_mib(limit.nbytes)} for"
            f" batches, and no running call will free any. In use: {in_use or 'nothing'}. Fix: a larger"
            " --object-store-memory of Ray, or smaller data.batch_size, group_size or max_tokens."
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
