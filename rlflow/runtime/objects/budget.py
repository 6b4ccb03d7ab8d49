"""How much may lie in the store of each host: who wants to put something there waits until there is room.

How much of the hosts' object stores batches may take, and whether that is enough for a plan.
"""

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
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
from rlflow.runtime.ray.cluster.hosts import quiet_ray

# The edge of the graph that is being made; what is put into the store meanwhile counts as its.
_EDGE: ContextVar[str] = ContextVar("edge", default="")


@contextmanager
def edge(name: str) -> Iterator[None]:
    """What is asked of workers inside makes the edge ``name``; within another, that is written before it."""
    outer = _EDGE.get()
    token = _EDGE.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        _EDGE.reset(token)


def current_edge() -> str:
    """That of ``edge`` around."""
    return _EDGE.get() or "other"


@dataclass(frozen=True)
class StoreLimit:
    """Of the store of one host."""

    name: str
    """The host's, for people."""
    nbytes: int
    """What batches may take of it."""


@dataclass
class _Use:
    used: int = 0
    peak: int = 0
    by_edge: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class _Asked:
    host: str
    edge: str
    nbytes: int
    granted: "Future[None]" = field(default_factory=Future)


class Budget:
    """Its methods may be called from any thread, ``release`` also while any other runs: it is called when objects go.

    Room is given in the order in which it is asked for. Only calls that run can let go of something: when all of them
    wait for room, none will come, and all that wait fail.
    """

    def __init__(self, limits: Mapping[str, StoreLimit]) -> None:
        """``limits``: by the id of the host."""
        self.limits = limits
        self._use = {host: _Use() for host in limits}
        self._sums: Counter[str] = Counter()
        self._asked: list[_Asked] = []
        self._running = 0
        # Set down without the lock, which may be held by the very thread that a release interrupts.
        self._events: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A call runs, until ``end``."""
        self._do(lambda: self._count(1))

    def end(self) -> None:
        self._do(lambda: self._count(-1))

    def reserve(self, host: str, nbytes: int, edge: str) -> "Future[None]":
        """Is done when there is room, with EngineError when there is none to come. ``release`` gives it back."""
        asked = _Asked(host, edge, nbytes)
        self._do(lambda: self._asked.append(asked))
        return asked.granted

    def release(self, host: str, nbytes: int, edge: str) -> None:
        self._do(lambda: self._take(host, edge, -nbytes))

    def hold(self, holder: Any, host: str, nbytes: int, edge: str) -> None:
        """Releases so much of what is reserved when ``holder`` goes."""
        finalize(holder, self.release, host, nbytes, edge).atexit = False

    @property
    def peaks(self) -> dict[str, int]:
        """By host's name, the most bytes that batches had there at a time."""
        return {limit.name: self._use[host].peak for host, limit in self.limits.items()}

    @property
    def used(self) -> dict[str, int]:
        """By host's name, in bytes."""
        return {limit.name: self._use[host].used for host, limit in self.limits.items()}

    def taken_sums(self) -> dict[str, int]:
        """By edge, the bytes that were put for it since this was last called."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)

    def _do(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        # Whoever has the lock looks again after letting go of it: nothing that is set down is left lying.
        while self._events and self._lock.acquire(blocking=False):
            done: list[tuple[Future[None], EngineError | None]] = []
            try:
                while self._events:
                    self._events.popleft()()
                done = self._settle()
            finally:
                self._lock.release()
            for granted, error in done:
                granted.set_exception(error) if error else granted.set_result(None)

    def _count(self, change: int) -> None:
        self._running += change

    def _take(self, host: str, edge: str, nbytes: int) -> None:
        use = self._use[host]
        use.used += nbytes
        use.by_edge[edge] += nbytes
        use.peak = max(use.peak, use.used)
        if nbytes > 0:
            self._sums[edge] += nbytes

    def _settle(self) -> "list[tuple[Future[None], EngineError | None]]":
        """Those whose waiting is over."""
        done: list[tuple[Future[None], EngineError | None]] = []
        full: set[str] = set()
        for asked in list(self._asked):
            fits = self._use[asked.host].used + asked.nbytes <= self.limits[asked.host].nbytes
            if fits and asked.host not in full:
                self._take(asked.host, asked.edge, asked.nbytes)
                done.append((asked.granted, None))
                self._asked.remove(asked)
            elif asked.nbytes > self.limits[asked.host].nbytes:
                done.append((asked.granted, self._full(asked)))
                self._asked.remove(asked)
            else:
                full.add(asked.host)
        if self._asked and len(self._asked) >= self._running:
            gc.collect()  # what nobody can reach any more may still hold blocks
            if self._events:
                return done
            done += [(asked.granted, self._full(asked)) for asked in self._asked]
            self._asked.clear()
        return done

    def _full(self, asked: _Asked) -> EngineError:
        limit, use = self.limits[asked.host], self._use[asked.host]
        held = ", ".join(f"{edge} {_mib(size)}" for edge, size in use.by_edge.most_common() if size > 0)
        return EngineError(
            f"store of {limit.name}: {asked.edge} asks for {_mib(asked.nbytes)} of {_mib(limit.nbytes)} that batches"
            f" may take there, and nothing that runs gives any back. Held: {held or 'nothing'}. Fix: a larger"
            " --object-store-memory of Ray, or smaller data.batch_size, group_size or max_tokens."
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


# Of a host's store. The rest is for what is cut out for readers on other hosts, for what its own readers fetch from
# there, of which Ray drops what nobody reads, for what it frees a second late, and for weights on their way.
_SHARE = 0.5
# Of a token of a rollout: its id, its logprob and its text.
_TOKEN_BYTES = 12


def store_limits() -> Mapping[str, StoreLimit]:
    """By the id of the Ray node."""
    return {
        node["NodeID"]: StoreLimit(node["NodeName"], int(_SHARE * node["Resources"].get("object_store_memory", 0)))
        for node in quiet_ray().nodes()
        if node["Alive"]
    }


def check_limits(plan: Plan, limits: Mapping[str, StoreLimit]) -> None:
    """``limits`` by the names of the plan's hosts. Raises PlacementError for a step, or a single sample, that does not
    fit."""
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
                f"{gib:.2f} GiB of a step's data are expected in the object store of {host} at once, and batches may"
                f" take {limits[host].nbytes / GIB:.2f} GiB of it",
                fix=fix.format("batch_size, group_size or max_tokens"),
            )
