"""A pool of worker processes for reward functions and environments, with a time limit for each call.

A user's function may hang, crash or exit, so any worker may be killed at any time. A *fork server* is started once,
imports what the functions need, and forks workers from itself, which takes a millisecond. Each worker has a thread of
this process, which sends it one call after another. A worker that misses the deadline of its call or dies is killed
with everything that it started, and another one takes its place.
"""

import pickle
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rlflow.rewards.base import CallableSpec, Failure, LoadedCallable
from rlflow.rewards.workers import ForkedWorker, ForkServer
from rlflow.system.processes import num_usable_cpus


class ProcessPool:
    """A pool with one worker for each usable CPU. The workers end on ``stop`` or with this object.

    Any number of threads may use it at once.
    """

    def __init__(self, specs: Mapping[str, CallableSpec], num_workers: int | None = None) -> None:
        """Load the callables here and in the fork server. Raises RecipeError and EngineError."""
        self.callables = {name: spec.load(name) for name, spec in specs.items()}
        self.fork_server = ForkServer(specs)
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        num_workers = num_workers or num_usable_cpus()
        self.stop = weakref.finalize(self, _stop_pool, self._calls, self.fork_server, num_workers)
        for number in range(num_workers):
            # A thread does not refer to this object, so that the object can end.
            dispatcher = _Dispatcher(self._calls, self.fork_server, self.callables)
            threading.Thread(target=dispatcher.run, name=f"reward worker {number}", daemon=True).start()

    def submit(self, name: str, texts: Sequence[str], rows: Sequence[Any]) -> "list[Future[Any]]":
        """Call a callable with texts and a row for each; return a future of the outcome for each text.

        The texts are divided into batches of the size that the callable takes. A batch that fails as a whole is
        repeated in halves. Cancelled futures get no outcome, and their calls are left out unless they
        have started. Futures raise EngineError when no worker can be started.
        """
        futures: list[Future[Any]] = [Future() for _ in texts]
        size = self.callables[name].batch_size
        for start in range(0, len(texts), size):
            batch = slice(start, start + size)
            self._calls.put(_Call(name, texts[batch], rows[batch], futures[batch]))
        return futures


@dataclass(frozen=True)
class _Call:
    """Some texts for one callable of a pool."""

    name: str
    """The callable's name in the pool."""
    texts: Sequence[str]
    rows: Sequence[Any]
    """One argument for each text: a row of the data set, or an environment's row and state."""
    futures: "Sequence[Future[Any]]"

    def split(self) -> "list[_Call]":
        """Return a call for each half of the texts."""
        middle = len(self.texts) // 2
        parts = slice(middle), slice(middle, None)
        return [_Call(self.name, self.texts[part], self.rows[part], self.futures[part]) for part in parts]


class _Dispatcher:
    """Sends calls to one worker process, which it replaces when the process dies or is late."""

    def __init__(
        self,
        calls: "SimpleQueue[_Call | None]",
        fork_server: ForkServer,
        callables: Mapping[str, LoadedCallable],
    ) -> None:
        self._calls, self._fork_server, self._callables = calls, fork_server, callables
        self._worker: ForkedWorker | None = None

    def run(self) -> None:
        """Process calls until None arrives; the work of a thread."""
        while (call := self._calls.get()) is not None:
            if not all(future.cancelled() for future in call.futures):
                self._process(call)
            # While this thread waits, its last call must not keep the futures' callbacks alive, and so the pool.
            del call

    def _process(self, call: _Call) -> None:
        """Complete the futures of a call, or put it back in parts if one of its texts may have made all of it fail."""
        try:
            answer = self._answer(call)
        except Exception as error:  # whatever it is, callers must not wait forever
            for future in call.futures:
                with suppress(InvalidStateError):  # it was cancelled
                    future.set_exception(error)
            return
        if isinstance(answer, Failure):
            is_late = answer.kind == "timeout" and not self._callables[call.name].enforces_timeout
            if len(call.texts) > 1 and (is_late or answer.kind in ("raised", "died")):
                for half in call.split():
                    self._calls.put(half)
                return
            answer = [answer] * len(call.texts)
        for future, outcome in zip(call.futures, answer, strict=True):
            with suppress(InvalidStateError):
                future.set_result(outcome)

    def _answer(self, call: _Call) -> list[Any] | Failure:
        """Return the worker's outcomes, or why the call failed as a whole. Raises EngineError."""
        message = pickle.dumps((call.name, call.texts, call.rows))
        loaded = self._callables[call.name]
        while True:
            worker = self._worker = self._worker or self._fork_server.start_worker()
            try:
                answer: list[Any] | Failure = worker.call(message, loaded.limit_s)
                return answer
            except TimeoutError:
                self._end_worker()
                return Failure("timeout", f"took longer than its timeout_s of {loaded.timeout_s:g} s")
            except OSError:  # it had died before this call
                self._end_worker()
            except EOFError:
                return Failure("died", f"ended its process ({self._end_worker()})")

    def _end_worker(self) -> str:
        worker, self._worker = self._worker, None
        assert worker is not None
        return self._fork_server.end_worker(worker)


def _stop_pool(calls: "SimpleQueue[_Call | None]", fork_server: ForkServer, num_workers: int) -> None:
    for _ in range(num_workers):
        calls.put(None)
    fork_server.stop()
