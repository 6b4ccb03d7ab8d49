"""Calls of reward functions, spread over workers, each with a deadline."""

import selectors
import signal
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rlflow.errors import EngineError
from rlflow.rewards.base import Failure, Findable
from rlflow.rewards.pool.fork_client import Call, Nursery, Worker
from rlflow.rewards.processes import processors

# A worker is given so much work ahead that it need not wait for more.
_AHEAD_S = 0.01
# Of a function that has not been called yet.
_FIRST_S = 1.0


class Pool:
    """As many workers as this process may use processors. ``stop`` ends them, and so does the end of this object."""

    def __init__(self, parts: Mapping[str, Findable], num_workers: int | None = None) -> None:
        """Raises EngineError."""
        self.num_workers = num_workers or processors()
        self._parts = parts
        self.found = {name: part.find(name) for name, part in parts.items()}
        self.nursery = Nursery(parts)
        self.workers: list[Worker] = []
        self._pace: defaultdict[str, float] = defaultdict(lambda: _FIRST_S)
        """Seconds of a call of each part, lately."""
        self.stop = weakref.finalize(self, _stop, self.workers, self.nursery)

    def outcomes(self, calls: Iterable[Call]) -> Generator[tuple[Call, list[Any]], None, None]:
        """Of each call, in the order in which they are done; a call that fails as a whole is made again a response at a
        time. To be closed when not all of them are wanted. Raises EngineError when there can be no workers.
        """
        waiting = deque(calls)
        try:
            while waiting or any(worker.begun for worker in self.workers):
                self._hand_out(waiting)
                for call, outcomes in self._done(waiting):
                    if len(call.places) > 1 and self._is_whole(call, outcomes[0]):
                        waiting.extendleft(call.singly())
                    else:
                        yield call, outcomes
        finally:
            for worker in [worker for worker in self.workers if worker.begun]:
                with suppress(EngineError):  # its nursery has ended, and it with that
                    self._end(worker)

    def _is_whole(self, call: Call, first: Any) -> bool:
        """Whether a failure is that of a whole call, of which a single response may have been the cause."""
        if not isinstance(first, Failure):
            return False
        return first.kind in ("raised", "died") or (first.kind == "timeout" and not self.found[call.part].keeps_time)

    def _hand_out(self, waiting: deque[Call]) -> None:
        while waiting and len(self.workers) < self.num_workers:
            pid, end = self.nursery.fork()
            self.workers.append(Worker(pid, end))
        for worker in list(self.workers):
            while waiting and sum(self._pace[call.part] for call in worker.begun) < _AHEAD_S:
                call = waiting.popleft()
                try:
                    is_given = worker.give(call, self.found[call.part].limit_s)
                except OSError:  # it has gone
                    is_given = False
                    if not worker.begun:  # else that is seen where its answers are read
                        self._end(worker)
                if not is_given:
                    waiting.appendleft(call)
                    break

    def _done(self, waiting: deque[Call]) -> Iterator[tuple[Call, list[Any]]]:
        """What the workers say until the next of their deadlines; what is over it has failed."""
        busy = [worker for worker in self.workers if worker.begun]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            first = min(worker.deadline for worker in busy)
            ready = [key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))]
            now = time.monotonic()
        for worker in ready:
            answers = worker.messages()
            for answer in answers or ():
                call, seconds = worker.answered()
                self._pace[call.part] += (seconds - self._pace[call.part]) / 4
                yield call, answer
            if answers is None:
                yield self._failed(worker, waiting)
        for worker in busy:
            if worker not in ready and worker.deadline <= now:
                yield self._failed(worker, waiting, is_late=True)

    def _failed(self, worker: Worker, waiting: deque[Call], is_late: bool = False) -> tuple[Call, list[Any]]:
        """The call that it was at; those that it had not begun wait again."""
        call, *others = worker.begun
        waiting.extendleft(reversed(others))
        status = self._end(worker)
        if is_late:
            failure = Failure("timeout", f"took longer than {self._parts[call.part].timeout_s:g} s")
        else:
            failure = Failure("died", f"ended its process ({_how(status)})")
        return call, [failure] * len(call.places)

    def _end(self, worker: Worker) -> int:
        self.workers.remove(worker)
        worker.socket.close()
        return self.nursery.end(worker.pid)


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-status, f"signal {-status}")


def _stop(workers: list[Worker], nursery: Nursery) -> None:
    for worker in workers:
        worker.socket.close()
    workers.clear()
    nursery.stop()
