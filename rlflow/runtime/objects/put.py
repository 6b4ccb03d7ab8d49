"""Calls of workers whose results go into the stores of their hosts, when there is room."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rlflow.batch import Batch
from rlflow.errors import EngineError
from rlflow.runtime.objects.budget import Budget, current_edge
from rlflow.runtime.objects.dispatch import Part
from rlflow.runtime.objects.pending import Answer
from rlflow.runtime.objects.store import blocks_of

Remote = Callable[..., "Future[Any]"]
"""Calls a method of one worker by its name: one of those that EngineWorker has."""


class Handover:
    """In two phases, so that nothing is put where there is no room: a worker keeps what it has made and says how much
    that is, and puts it when the budget has granted so much."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._tickets = itertools.count()
        # Ray's own thread tells that calls are done, and must not be kept waiting.
        self._thread = ThreadPoolExecutor(1, "handover")

    @contextmanager
    def running(self) -> Iterator["Handover"]:
        """Until the end of it."""
        with self._thread:
            yield self

    def ticket(self) -> int:
        """A new one."""
        return next(self._tickets)

    def call(
        self,
        remote: Remote,
        method: str,
        *arguments: Any,
        named: Mapping[str, Any] | None = None,
        wanted: bool = True,
    ) -> "Future[Any]":
        """A method of the worker's engine. The columns of what it returns lie in the store; None for a result that is
        not wanted."""
        ticket, edge = self.ticket(), current_edge()

        def go_on(answer: Answer) -> Any:
            return self._put(remote, ticket, answer.host, answer.nbytes, edge) if answer.nbytes else answer.result

        return self._counted(
            lambda: self._then(self._keep(remote, ticket if wanted else None, method, arguments, named), go_on)
        )

    def keep(self, remote: Remote, ticket: int, method: str, *arguments: Any) -> "Future[Answer]":
        """A method of the worker's engine, whose result it keeps. More may be kept under one ticket."""
        return self._counted(lambda: self._keep(remote, ticket, method, arguments))

    def put(self, remote: Remote, ticket: int, host: str, nbytes: int) -> "Future[Any]":
        """All that the worker on ``host`` keeps under the ticket, which is ``nbytes``, in the store of its host."""
        edge = current_edge()
        return self._counted(lambda: self._put(remote, ticket, host, nbytes, edge))

    def _keep(
        self,
        remote: Remote,
        ticket: int | None,
        method: str,
        arguments: Sequence[Any],
        named: Mapping[str, Any] | None = None,
    ) -> "Future[Answer]":
        sent = [argument.sent() if isinstance(argument, Part) else argument for argument in arguments]
        call: Future[Answer] = remote("keep", ticket, method, *sent, **(named or {}))
        return call

    def _put(self, remote: Remote, ticket: int, host: str, nbytes: int, edge: str) -> "Future[Any]":
        def hold(batch: Batch) -> Batch:
            for block in blocks_of(batch):
                if not block.held:
                    block.held = True
                    self.budget.hold(block, host, block.nbytes, edge)
            return batch

        def put(_: None) -> "Future[Any]":
            putting = remote("put", ticket)
            putting.add_done_callback(give_back)
            return self._then(putting, hold)

        def give_back(done: "Future[Any]") -> None:
            if done.exception() is not None:
                self.budget.release(host, nbytes, edge)

        reserved = self.budget.reserve(host, nbytes, edge)
        reserved.add_done_callback(lambda done: remote("drop", ticket) if done.exception() else None)
        return self._then(reserved, put)

    def _counted(self, start: "Callable[[], Future[Any]]") -> "Future[Any]":
        """The budget knows that it runs."""
        self.budget.begin()
        try:
            call = start()
        except BaseException:
            self.budget.end()
            raise
        call.add_done_callback(lambda _: self.budget.end())
        return call

    def _then(self, call: "Future[Any]", function: Callable[[Any], Any]) -> "Future[Any]":
        """What ``function`` makes of the result, which may be another call."""
        whole: Future[Any] = Future()

        def finish(done: "Future[Any]") -> None:
            if error := done.exception():
                whole.set_exception(error)
            else:
                whole.set_result(done.result())

        def go_on(result: Any) -> None:
            try:
                following = function(result)
            except Exception as error:  # it is told to whoever waits
                whole.set_exception(error)
                return
            if isinstance(following, Future):
                following.add_done_callback(finish)
            else:
                whole.set_result(following)

        def pass_on(done: "Future[Any]") -> None:
            if done.exception():
                whole.set_exception(done.exception())
                return
            try:
                self._thread.submit(go_on, done.result())
            except RuntimeError:  # the run has ended
                whole.set_exception(EngineError("the run has ended."))

        call.add_done_callback(pass_on)
        return whole
