"""A process of a run: an actor of Ray whose calls have time limits."""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlflow.errors import EngineError, UserError, first_line
from rlflow.runtime.objects.object_process import ObjectProcess, Pulse
from rlflow.runtime.objects.slices import BatchSlice
from rlflow.runtime.objects.store_usage import StoreUsage, current_edge
from rlflow.runtime.ray.waits import Wait
from rlflow.runtime.ray.watchdog import Watchdog

# The concurrency group of questions about the process itself, which wait for none of its other calls.
_STATUS_GROUP = "status"
# Seconds for what a live process answers at once.
_ANSWER_S = 2.0


class RemoteProcess:
    """An ObjectProcess on some host, under the eye of the watchdog."""

    def __init__(
        self,
        kind: type[ObjectProcess],
        options: dict[str, Any],
        name: str,
        host: str,
        is_here: bool,
        watchdog: Watchdog,
        store_usage: StoreUsage,
    ) -> None:
        """Start the process with Ray's ``options``, without waiting for it.

        ``host`` is the id of its Ray node; ``is_here`` says that it is on the machine of this process. ``store_usage``
        counts what the process puts into its host's object store.
        """
        watchdog.check()
        self.name, self.host = name, host
        self.pid: int | None = None
        self.end_error: EngineError | None = None
        """Why the process was ended, if it was."""
        self._is_here, self._watchdog, self._store_usage = is_here, watchdog, store_usage
        self._calls: set[Future[Any]] = set()
        self.actor: Any = ray.remote(concurrency_groups={_STATUS_GROUP: 1})(kind).options(**options).remote()
        self.ask()

    def call(self, wait: Wait, method: str, *arguments: Any, **named: Any) -> "Future[Any]":
        """Call a method of the process, within the limits of ``wait``."""
        return self.watched(getattr(self.actor, method).remote(*arguments, **named), wait)

    def call_and_put(self, wait: Wait, is_wanted: bool, method: str, /, *arguments: Any, **named: Any) -> "Future[Any]":
        """Call a method of the process's object; the columns of a wanted result stay in the store of its host."""
        edge = current_edge()
        sent = [argument.to_message() if isinstance(argument, BatchSlice) else argument for argument in arguments]
        reference = self.actor.call_and_put.remote(is_wanted, method, *sent, **named)
        return self.watched(reference, wait, lambda result: self._store_usage.add(result, edge))

    def watched(self, reference: Any, wait: Wait, on_result: Callable[[Any], None] | None = None) -> "Future[Any]":
        """Return a future for one of Ray's references to the result of a call, within the limits of ``wait``."""
        call = as_future(reference, self.name, lambda: self.end_error, on_result)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        self._watchdog.watch(self, call, wait)
        return call

    def status(self, method: str) -> "Future[Any]":
        """Call a method that answers whatever else the process does."""
        answer: Future[Any] = getattr(self.actor, method).options(concurrency_group=_STATUS_GROUP).remote().future()
        return answer

    def ask(self) -> "Future[Pulse]":
        question = self.status("pulse")
        question.add_done_callback(self._note_pid)
        return question

    def end(self, error: EngineError) -> None:
        """Kill the process. All its calls fail with ``error``, whether Ray still works or not."""
        self.end_error = error
        self.kill()
        for call in list(self._calls):
            with suppress(InvalidStateError):
                call.set_exception(error)

    def kill(self) -> None:
        """Kill the process, also one that is stopped."""
        with suppress(RayError):  # Ray may be gone itself
            ray.kill(self.actor)
        if self.end_error is not None and self._is_here and self.pid is not None:
            # Ray asks politely first, and may be gone before it kills.
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _note_pid(self, answer: "Future[Pulse]") -> None:
        if answer.exception() is None:
            self.pid = answer.result().pid


def are_dead(processes: Sequence[RemoteProcess]) -> list[bool]:
    """Return which processes have died or were ended. One that does not answer counts as alive."""
    answers = [process.ask() for process in processes]
    wait(answers, timeout=_ANSWER_S)
    died = [answer.done() and answer.exception() is not None for answer in answers]
    return [is_dead or process.end_error is not None for process, is_dead in zip(processes, died, strict=True)]


def as_future(
    reference: Any,
    name: str,
    end_error: Callable[[], EngineError | None] = lambda: None,
    on_result: Callable[[Any], None] | None = None,
) -> "Future[Any]":
    """Return a future for one of Ray's references, whose failures are EngineErrors about the process ``name``.

    ``end_error`` returns why the process was ended, if it was. ``on_result`` gets the result before anyone else.
    """
    future: Future[Any] = Future()

    def complete(answer: "Future[Any]") -> None:
        error = answer.exception()
        with suppress(InvalidStateError):  # the process was ended, and its calls have failed with the reason
            if error is None:
                if on_result is not None:
                    on_result(answer.result())
                future.set_result(answer.result())
            else:
                future.set_exception(_as_engine_error(error, name, end_error()))

    reference.future().add_done_callback(complete)
    return future


def _as_engine_error(error: BaseException, name: str, end_error: EngineError | None) -> BaseException:
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError | EngineError):
        return error.cause
    if isinstance(error, RayActorError):
        return end_error or EngineError(f"{name} died: {first_line(error)}.")
    cause = error.cause if isinstance(error, RayTaskError) else error
    return EngineError(f"{name}: {first_line(cause)}.")
