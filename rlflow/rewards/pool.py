"""A pool of worker processes for reward functions and environments, with a deadline for each call.

A user's function may hang, crash or exit, so any worker may be killed at any time. A *fork server* is started once,
imports what the functions need, and forks workers from itself, which takes a millisecond. A call's deadline counts from
when a worker that is ready takes it. A worker that misses its deadline or dies is killed with everything that it
started, and another one takes its place.
"""

import selectors
import signal
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rlflow.errors import EngineError
from rlflow.rewards.base import CallableSpec, Failure
from rlflow.rewards.calls import Call, CallQueue
from rlflow.rewards.processes import num_usable_cpus
from rlflow.rewards.workers import ForkedWorker, ForkServer

# Seconds of work that are queued at a worker, so that it need not wait for the next call.
_QUEUED_S = 0.01
# The assumed duration of the first call of a function.
_FIRST_CALL_S = 1.0


class ProcessPool:
    """A pool with one worker for each usable CPU. The workers end on ``stop`` or with this object.

    It works for one thread at a time; others wait.
    """

    def __init__(self, specs: Mapping[str, CallableSpec], num_workers: int | None = None) -> None:
        """Load the callables here and in the fork server. Raises RecipeError and EngineError."""
        self.num_workers = num_workers or num_usable_cpus()
        self._specs = specs
        self.callables = {name: spec.load(name) for name, spec in specs.items()}
        self.fork_server = ForkServer(specs)
        self.workers: list[ForkedWorker] = []
        self._call_seconds: defaultdict[str, float] = defaultdict(lambda: _FIRST_CALL_S)
        """A moving average of the duration of a call, for each callable."""
        self._selector = selectors.DefaultSelector()
        """The sockets of all workers."""
        self._lock = threading.Lock()
        """Held while calls are in progress."""
        self.stop = weakref.finalize(self, _stop_pool, self.workers, self.fork_server, self._selector)

    def outcomes(self, calls: Iterable[Call] | CallQueue) -> Generator[tuple[Call, list[Any]], None, None]:
        """Yield each call with its outcomes, in the order in which calls finish.

        A call that fails as a whole is repeated with one response at a time. Close the generator to abandon the
        remaining calls. With a CallQueue, the calls in it when it is closed are abandoned. Raises EngineError when no
        worker can be started.
        """
        with self._lock:
            yield from self._outcomes(calls)

    def _outcomes(self, calls: Iterable[Call] | CallQueue) -> Iterator[tuple[Call, list[Any]]]:
        arriving = calls if isinstance(calls, CallQueue) else None
        queue = deque(() if isinstance(calls, CallQueue) else calls)
        if arriving is not None:
            self._selector.register(arriving, selectors.EVENT_READ)
        try:
            while arriving or queue or any(worker.pending for worker in self.workers):
                if arriving is not None:
                    queue.extend(arriving.take())
                    # Taking calls may also take the notice that no more will come.
                    if not arriving.is_open:
                        break
                self._dispatch(queue)
                for call, outcomes in self._finished_calls(queue):
                    if len(call.indices) > 1 and self._may_be_one_response(call, outcomes[0]):
                        queue.extendleft(call.split())
                    else:
                        yield call, outcomes
        finally:
            if arriving is not None:
                self._selector.unregister(arriving)
            for worker in [worker for worker in self.workers if worker.pending]:
                with suppress(EngineError):  # the fork server has died, and the worker with it
                    self._end(worker)

    def _may_be_one_response(self, call: Call, first: Any) -> bool:
        """Return whether one response of the call may have caused the failure of all of them."""
        if not isinstance(first, Failure):
            return False
        is_late = first.kind == "timeout" and not self.callables[call.name].enforces_timeout
        return first.kind in ("raised", "died") or is_late

    def _dispatch(self, queue: deque[Call]) -> None:
        """Start missing workers, and fill the workers' queues."""
        while queue and len(self.workers) < self.num_workers:
            pid, end = self.fork_server.fork()
            self.workers.append(ForkedWorker(pid, end))
            self._selector.register(end, selectors.EVENT_READ, self.workers[-1])
        for worker in [worker for worker in self.workers if worker.is_ready]:
            while queue and sum(self._call_seconds[call.name] for call in worker.pending) < _QUEUED_S:
                call = queue.popleft()
                try:
                    is_submitted = worker.submit(call, self.callables[call.name].limit_s)
                except OSError:  # the worker has died
                    is_submitted = False
                    if not worker.pending:  # with pending calls, reading the answers finds it out
                        self._end(worker)
                if not is_submitted:
                    queue.appendleft(call)
                    break

    def _finished_calls(self, queue: deque[Call]) -> Iterator[tuple[Call, list[Any]]]:
        """Wait for answers until the next deadline; yield the answered calls, and failures for those that are late.

        Raises EngineError when a worker does not get ready.
        """
        busy = [worker for worker in self.workers if worker.pending or not worker.is_ready]
        if not busy and queue:
            return
        limit = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if busy else None
        ready = [key.data for key, _ in self._selector.select(limit) if key.data is not None]
        now = time.monotonic()
        for worker in ready:
            answers = worker.receive()
            for answer in answers or ():
                call, seconds = worker.pop_answered()
                self._call_seconds[call.name] += (seconds - self._call_seconds[call.name]) / 4
                yield call, answer
            if answers is None and worker not in busy:
                self._end(worker)
            elif answers is None:
                yield self._fail(worker, queue)
        for worker in busy:
            if worker not in ready and worker.deadline <= now:
                yield self._fail(worker, queue, is_late=True)

    def _fail(self, worker: ForkedWorker, queue: deque[Call], is_late: bool = False) -> tuple[Call, list[Any]]:
        """End a worker; return its current call as failed, and put its other calls back into the queue.

        Raises EngineError for a worker that was never ready, since no call is at fault.
        """
        if not worker.is_ready:
            exit_code = self._end(worker)
            fact = "it was not ready in time" if is_late else f"it ended ({_describe_exit(exit_code)})"
            raise EngineError(f"a worker process of reward functions did not start: {fact}.")
        call, *others = worker.pending
        queue.extendleft(reversed(others))
        exit_code = self._end(worker)
        if is_late:
            failure = Failure("timeout", f"took longer than its timeout_s of {self._specs[call.name].timeout_s:g} s")
        else:
            failure = Failure("died", f"ended its process ({_describe_exit(exit_code)})")
        return call, [failure] * len(call.indices)

    def _end(self, worker: ForkedWorker) -> int:
        self.workers.remove(worker)
        self._selector.unregister(worker.socket)
        worker.socket.close()
        return self.fork_server.end(worker.pid)


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-exit_code, f"signal {-exit_code}")


def _stop_pool(workers: list[ForkedWorker], fork_server: ForkServer, selector: selectors.BaseSelector) -> None:
    selector.close()
    for worker in workers:
        worker.socket.close()
    workers.clear()
    fork_server.stop()
