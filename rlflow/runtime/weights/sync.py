"""Weight sync from the workers of one role to those of another, with limits on time and attempts."""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

from rlflow.engines.base import GpuTransport
from rlflow.errors import EngineError, UserError
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.weights.gpu import Receivers

_ATTEMPTS = 3
# A worker that does not answer for so long hangs: a bucket takes less than a second, all weights from GPU to GPU take
# seconds.
LIMIT_S = 600.0
# For calls that a live process answers at once.
_ANSWER_S = 5.0


class SyncWorkers(Protocol):
    """The workers of a role, as far as a weight sync uses them."""

    gpu_transport: GpuTransport | None
    """How the role gets weights from GPU to GPU; None: through the object store."""
    receivers_connected: bool
    """Its engines are connected to the current sender of weights from GPU to GPU."""

    def __len__(self) -> int: ...

    @property
    def actors(self) -> list[Any]:
        """Return the Ray handles of the workers, by rank."""

    @property
    def num_gpus_each(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def any_ended(self) -> bool: ...

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]": ...

    def call_all(self, method: str, *arguments: Any) -> "list[Future[Any]]": ...

    def next_bucket(self, rank: int) -> "tuple[Any, Future[bool]]": ...

    def calls_in_progress(self, rank: int) -> "Future[list[str]]": ...

    def dead_ranks(self) -> list[int]: ...

    def restart(self, ranks: Sequence[int]) -> None: ...

    def end(self, rank: int, reason: str) -> None: ...

    def name(self, rank: int) -> str: ...


_Worker = tuple[SyncWorkers, int]
"""A worker: its role and its rank."""


class WeightsNotLoadedError(EngineError):
    """A weight sync whose weights some engines did not load."""

    def __init__(self, reason: str, ranks: Sequence[int]) -> None:
        super().__init__(reason)
        self.ranks = ranks


def sync_weights(source: SyncWorkers, target: SyncWorkers, version: int) -> None:
    """Sync the weights of ``source`` to all engines of ``target``.

    Raises EngineError when an engine has not loaded all of them.
    """
    if target.gpu_transport is not None:
        _sync_gpu_to_gpu(source, target, target.gpu_transport, version)
    else:
        _sync_through_store(source, target, version)


def _sync_through_store(source: SyncWorkers, target: SyncWorkers, version: int) -> None:
    """Transfer the weights through the object store, and again when that fails.

    An engine whose process has ended is replaced at once, one that fails otherwise before the last attempt; the others
    keep running. Raises EngineError, at once where a worker of ``source`` had to be ended.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _sync_by_buckets(source, target, version)
            return
        except EngineError as error:
            if source.any_ended or attempt == _ATTEMPTS:
                raise
            broken = target.dead_ranks()
            if attempt == _ATTEMPTS - 1 and isinstance(error, WeightsNotLoadedError):
                broken = sorted({*broken, *error.ranks})
            if broken:
                target.restart(broken)


def _sync_by_buckets(source: SyncWorkers, target: SyncWorkers, version: int) -> None:
    """Load each bucket while the next one is gathered. When this returns, no engine is loading any more."""
    calls = [source.call(rank, "start_sending", rank == 0) for rank in range(len(source))]
    _wait_for(_by_worker(source, calls) | _by_worker(target, target.call_all("start_receiving")))
    loading: list[Future[None]] = target.call_all("receive_weights", version)
    end: str | None = None
    """None after the last bucket, or the reason why no more buckets will come."""
    try:
        pushes: list[Future[None]] = []
        while (bucket := _next_bucket(source)) is not None:
            _wait_for(_by_worker(target, pushes))
            if any(call.done() for call in loading):
                end = "another engine has not loaded the weights"
                break
            pushes = target.call_all("push_bucket", bucket)
        _wait_for(_by_worker(target, pushes))
    except (EngineError, UserError) as error:
        end = str(error)
    target.call_all("push_bucket", end)
    late = wait(loading, timeout=LIMIT_S).not_done
    if late:
        _end([(target, rank) for rank, call in enumerate(loading) if call in late])
    errors = {rank: call.exception() for rank, call in enumerate(loading)}
    failed = {rank: error for rank, error in errors.items() if error is not None and str(error) != end}
    if failed:
        first = next(iter(failed.values()))
        raise WeightsNotLoadedError(str(first), list(failed)) if isinstance(first, EngineError) else first
    wait_all(loading)


def _next_bucket(source: SyncWorkers) -> Any | None:
    """Have all ranks gather the next bucket. Return Ray's reference to rank 0's, or None after the last bucket."""
    buckets = [source.next_bucket(rank) for rank in range(len(source))]
    exists = _wait_for(_by_worker(source, [more for _, more in buckets]))[0]
    return buckets[0][0] if exists else None


def _sync_gpu_to_gpu(source: SyncWorkers, target: SyncWorkers, transport: GpuTransport, version: int) -> None:
    """Transfer the weights by vLLM's own senders and receivers.

    Engines whose process has ended since the last sync are replaced first. A transfer that fails is not tried again:
    the failed process has left the others waiting in a collective operation. Raises EngineError.
    """
    if dead := target.dead_ranks():
        target.restart(dead)
    if not target.receivers_connected:
        _wait_for(_by_worker(source, source.call_all("disconnect_receivers")))
        target.receivers_connected = True
    receivers = Receivers(target.actors, target.num_gpus_each)
    calls = [
        source.call(rank, "send_gpu_to_gpu", transport, receivers, rank, source.address) for rank in range(len(source))
    ]
    _wait_for(_by_worker(source, calls), receiving=target)
    _wait_for(_by_worker(target, target.call_all("call", "finish_transfer", version)))


def _by_worker(workers: SyncWorkers, calls: "Sequence[Future[Any]]") -> "dict[Future[Any], _Worker]":
    """Return the worker of each call; ``calls`` has one call per rank."""
    return {call: (workers, rank) for rank, call in enumerate(calls)}


def _wait_for(calls: "Mapping[Future[Any], _Worker]", receiving: SyncWorkers | None = None) -> list[Any]:
    """Return the results in the order of ``calls``, and raise the first failure at once.

    Workers that do not answer in time are ended, with the busy ones of ``receiving``; then raises EngineError.
    """
    done, late = wait(calls, timeout=LIMIT_S, return_when=FIRST_EXCEPTION)
    if late and not any(call.exception() for call in done):
        busy = [(receiving, rank) for rank in busy_ranks(receiving)] if receiving else []
        _end([calls[call] for call in calls if call in late] + busy)
    return wait_all(list(calls))


def busy_ranks(workers: SyncWorkers) -> list[int]:
    """Return the ranks that are in a call of their engine, or that do not answer."""
    answers = [workers.calls_in_progress(rank) for rank in range(len(workers))]
    wait(answers, timeout=_ANSWER_S)
    idle = [answer.done() and answer.exception() is None and answer.result() == [] for answer in answers]
    return [rank for rank, is_idle in enumerate(idle) if not is_idle]


def _end(silent: Sequence[_Worker]) -> None:
    """End the processes of silent workers. Always raises EngineError, which names them."""
    for workers, rank in silent:
        workers.end(rank, f"did not answer for {LIMIT_S:g} s during a weight sync")
    names = "; ".join(workers.name(rank) for workers, rank in silent)
    raise EngineError(f"weight sync: no progress for {LIMIT_S:g} s. No answer from {names}.")
