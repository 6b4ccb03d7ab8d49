"""Results of worker calls on their way into the object stores, in two phases.

A worker first holds its result and reports the size; when the budget has granted that many bytes, it puts the result
into its host's store. So nothing is put where there is no room. ``HeldResults`` is the worker's side of this,
``StoreCalls`` the controller's.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_type_hints

import numpy as np

from rlflow.batch import Batch, Packed, Repeated
from rlflow.errors import EngineError
from rlflow.runtime.objects.budget import Budget, current_edge
from rlflow.runtime.objects.call_thread import CallThread
from rlflow.runtime.objects.ray_api import this_host
from rlflow.runtime.objects.slices import BatchSlice
from rlflow.runtime.objects.store import RowSpans, StoredColumn, blocks_of, check_even, put_array

RemoteCall = Callable[..., "Future[Any]"]
"""Calls a method of one worker process, an ObjectProcess, by its name."""


class StoreCalls:
    """Calls of workers whose results go into the object stores of their hosts."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._tickets = itertools.count()
        # Futures are completed by Ray's own thread, which must not wait for anything, or by the garbage collector.
        self._thread = CallThread("store-calls")

    @contextmanager
    def running(self) -> Iterator["StoreCalls"]:
        """Accept calls until the end of the block."""
        with self._thread.running():
            yield self

    def new_ticket(self) -> int:
        """Return a number under which a worker can hold results."""
        return next(self._tickets)

    def call(
        self,
        remote: RemoteCall,
        method: str,
        *arguments: Any,
        named: Mapping[str, Any] | None = None,
        wanted: bool = True,
    ) -> "Future[Any]":
        """Call a method of the worker's object; the columns of the result end up in the store.

        A result that is not ``wanted`` is dropped, and the call returns None.
        """
        ticket, edge = self.new_ticket(), current_edge()

        def put_if_held(result: CallResult) -> Any:
            return self._put(remote, ticket, result.host, result.nbytes, edge) if result.nbytes else result.value

        return self._counted(
            lambda: self._then(self._hold(remote, ticket if wanted else None, method, arguments, named), put_if_held)
        )

    def hold(self, remote: RemoteCall, ticket: int, method: str, *arguments: Any) -> "Future[CallResult]":
        """Call a method of the worker's object and leave the result in the worker, beside others of the same ticket."""
        return self._counted(lambda: self._hold(remote, ticket, method, arguments))

    def put(self, remote: RemoteCall, ticket: int, host: str, nbytes: int) -> "Future[Any]":
        """Put all that the worker on ``host`` holds under the ticket, ``nbytes`` in total, into its host's store."""
        edge = current_edge()
        return self._counted(lambda: self._put(remote, ticket, host, nbytes, edge))

    def _hold(
        self,
        remote: RemoteCall,
        ticket: int | None,
        method: str,
        arguments: Sequence[Any],
        named: Mapping[str, Any] | None = None,
    ) -> "Future[CallResult]":
        sent = [argument.to_message() if isinstance(argument, BatchSlice) else argument for argument in arguments]
        call: Future[CallResult] = remote("hold_result", ticket, method, *sent, **(named or {}))
        return call

    def _put(self, remote: RemoteCall, ticket: int, host: str, nbytes: int, edge: str) -> "Future[Any]":
        def put(_: None) -> "Future[Any]":
            putting = remote("put_results", ticket)
            putting.add_done_callback(release_on_failure)
            return self._then(putting, attach_to_budget)

        def release_on_failure(done: "Future[Any]") -> None:
            if done.exception() is not None:
                self.budget.release(host, nbytes, edge)

        def attach_to_budget(batch: Batch) -> Batch:
            for block in blocks_of(batch):
                if not block.is_budgeted:
                    block.is_budgeted = True
                    self.budget.release_with(block, host, block.nbytes, edge)
            return batch

        def drop() -> None:
            with suppress(Exception):  # the worker has gone, and with it what it holds
                remote("drop_results", ticket)

        reserved = self.budget.reserve(host, nbytes, edge)
        reserved.add_done_callback(lambda done: self._thread.add(drop) if done.exception() else None)
        return self._then(reserved, put)

    def _counted(self, start: "Callable[[], Future[Any]]") -> "Future[Any]":
        """Start a call, and let the budget know that it runs."""
        self.budget.begin_call()
        try:
            call = start()
        except BaseException:
            self.budget.end_call()
            raise
        call.add_done_callback(lambda _: self.budget.end_call())
        return call

    def _then(self, call: "Future[Any]", function: Callable[[Any], Any]) -> "Future[Any]":
        """Return the future of ``function`` applied to the result, which may return a call itself."""
        combined: Future[Any] = Future()

        def finish(done: "Future[Any]") -> None:
            if error := done.exception():
                combined.set_exception(error)
            else:
                combined.set_result(done.result())

        def pass_on(done: "Future[Any]") -> None:
            if error := done.exception():
                combined.set_exception(error)
                return
            try:
                if self._thread.is_over:
                    raise EngineError("the run has ended.")
                following = function(done.result())
            except Exception as error:  # raised again where the future is awaited
                combined.set_exception(error)
                return
            if isinstance(following, Future):
                following.add_done_callback(finish)
            else:
                combined.set_result(following)

        call.add_done_callback(lambda done: self._thread.add(partial(pass_on, done)))
        return combined


@dataclass(frozen=True)
class CallResult:
    """The result of a call, or the size of what the worker holds until the store has room."""

    value: Any
    """A result without packed columns of its own; otherwise None."""
    nbytes: int
    """The bytes that are held; 0 when nothing is."""
    host: str
    """The id of the Ray node that the worker is on."""


class HeldResults:
    """Batches that a worker has made and not yet put into the store, by ticket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, list[Batch]] = {}

    def add(self, ticket: int | None, result: Any) -> CallResult:
        """Hold a batch that has columns of its own and return its size. Return any other result itself.

        Raises EngineError for uneven columns.
        """
        host = this_host()
        if ticket is None or not isinstance(result, Batch):
            return CallResult(None if ticket is None else result, 0, host)
        check_even(result)
        sizes: list[int] = []
        batch = _as_declared(result).map_packed(lambda column: _measured(column, sizes))
        if not sizes:
            return CallResult(result, 0, host)
        with self._lock:
            self._batches.setdefault(ticket, []).append(batch)
        return CallResult(None, sum(sizes), host)

    def put(self, ticket: int) -> Any:
        """Return all batches of the ticket as one, in the order in which they came, with its columns in the store."""
        with self._lock:
            batches = self._batches.pop(ticket)
        known: list[RowSpans] = []
        return type(batches[0]).concatenate(batches).map_packed(lambda column: _stored(column, known))

    def drop(self, ticket: int) -> None:
        with self._lock:
            self._batches.pop(ticket, None)


def _as_declared(batch: Batch) -> Batch:
    """Convert columns to Repeated where the field is declared so, and only there, so that all batches can be joined."""
    hints = get_type_hints(type(batch))
    changed: dict[str, Packed] = {}
    for name, value in vars(batch).items():
        if not isinstance(value, Packed) or isinstance(value, StoredColumn):
            continue
        if hints[name] is Repeated and not isinstance(value, Repeated):
            changed[name] = Repeated.from_packed(_plain(value))
        elif hints[name] is not Repeated and isinstance(value, Repeated):
            changed[name] = _plain(value)
    return replace(batch, **changed) if changed else batch  # type: ignore[type-var]


def _measured(column: Packed, sizes: list[int]) -> Packed:
    """Note the bytes of a column that has to be put into the store."""
    if isinstance(column, StoredColumn | Repeated):
        return column
    sizes.append(column.values.nbytes)
    return _plain(column)


def _plain(column: Packed) -> Packed:
    """Return the column with values of its own. Raises EngineError when they do not fit its rows."""
    values = column.values
    if len(values) != column.offsets[-1]:
        raise EngineError(f"a column has {len(values)} values, and its rows need {column.offsets[-1]}.")
    return Packed(values, column.offsets)


def _stored(column: Packed, known: list[RowSpans]) -> Packed:
    """Put a column into the store. Columns with rows of the same lengths share their spans, collected in ``known``."""
    if isinstance(column, StoredColumn | Repeated):
        return column
    stored = StoredColumn.of(put_array(column.values), column.lengths)
    same = next((spans for spans in known if np.array_equal(spans.length, column.lengths)), None)
    if same is None:
        known.append(stored.spans)
        return stored
    return StoredColumn(stored.blocks, same)
