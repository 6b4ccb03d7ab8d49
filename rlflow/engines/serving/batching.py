"""A thread that owns vLLM's engine and works on the requests of all callers together."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlflow.errors import EngineError, first_line

Result = TypeVar("Result")

# An idle engine waits so long for more: prompts that are read together are read faster than one after another.
_TOGETHER_S = 0.01


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    params: Any
    """vLLM's SamplingParams."""


@dataclass(frozen=True)
class Written:
    """The responses to one group of requests."""

    outputs: list[Any]
    """vLLM's CompletionOutputs, in the order of the requests."""
    version: int
    """Of the weights that wrote them."""


@dataclass(eq=False)
class _Group:
    requests: Sequence[Request]
    done: "Future[Written]" = field(default_factory=Future)
    outputs: dict[int, Any] = field(default_factory=dict)
    version: int = 0


@dataclass(eq=False)
class _Call:
    function: Callable[[Any], Any]
    done: "Future[Any]" = field(default_factory=Future)


class Batcher:
    """Work is begun in the order in which it comes: a call waits for requests before it, and those after it wait."""

    version: int | None = 0
    """Of the weights; None while they are not whole. Set by calls."""
    asleep: bool = False
    """Set by calls."""

    def __init__(self, role: str, start: Callable[[], Any]) -> None:
        """``start`` makes vLLM's engine, which is used from this thread alone. Raises what it raises."""
        self._role = role
        self._inbox: SimpleQueue[_Group | _Call] = SimpleQueue()
        self._next: _Group | _Call | None = None
        self._live: dict[str, tuple[_Group, int]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._failure: EngineError | None = None
        started: Future[None] = Future()
        threading.Thread(target=self._serve, args=(start, started), name=f"{role} vllm", daemon=True).start()
        started.result()

    def generate(self, requests: Sequence[Request]) -> Written:
        """Returns when all are done. May be called from any thread. Raises EngineError."""
        group = _Group(requests)
        self._put(group)
        return group.done.result()

    def call(self, function: Callable[[Any], Result]) -> Result:
        """What ``function`` makes of vLLM's engine while it works on nothing else. Raises what it raises."""
        call = _Call(function)
        self._put(call)
        result: Result = call.done.result()
        return result

    def _put(self, work: _Group | _Call) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inbox.put(work)

    def _serve(self, start: Callable[[], Any], started: "Future[None]") -> None:
        try:
            engine = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while True:
                self._admit(engine)
                for output in engine.step():
                    if output.finished:
                        self._finish(output)
        except BaseException as error:  # whatever it is, callers wait
            self._fail(error)

    def _admit(self, engine: Any) -> None:
        """Begins what waits, and waits for work when there is none."""
        idle = not self._live
        while True:
            if self._next is None:
                try:
                    if not self._live:
                        self._next = self._inbox.get()
                    else:
                        self._next = self._inbox.get(block=idle, timeout=_TOGETHER_S)
                except Empty:
                    return
            if isinstance(self._next, _Group):
                self._add(engine, self._next)
            elif self._live:
                return
            else:
                self._run(engine, self._next)
            self._next = None

    def _add(self, engine: Any, group: _Group) -> None:
        if self.version is None or self.asleep:
            why = "it is asleep" if self.asleep else "its weights are not whole, since the last copy failed"
            group.done.set_exception(EngineError(f"role {self._role}: nothing is generated, {why}."))
            return
        group.version = self.version
        if not group.requests:
            group.done.set_result(Written([], self.version))
        names = [str(self._count + index) for index in range(len(group.requests))]
        self._count += len(names)
        try:
            for name, request in zip(names, group.requests, strict=True):
                engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, request.params)
        except Exception as error:  # vLLM refuses in many ways what is wrong with one request
            engine.abort_request(names)
            refused = EngineError(f"role {self._role}: vLLM does not take a request ({first_line(error)}).")
            refused.__cause__ = error
            group.done.set_exception(refused)
            return
        self._live |= {name: (group, index) for index, name in enumerate(names)}

    def _run(self, engine: Any, call: _Call) -> None:
        try:
            call.done.set_result(call.function(engine))
        except BaseException as error:
            call.done.set_exception(error)

    def _finish(self, output: Any) -> None:
        group, index = self._live.pop(output.request_id)
        group.outputs[index] = output.outputs[0]
        if len(group.outputs) == len(group.requests):
            in_order = [group.outputs[index] for index in range(len(group.requests))]
            group.done.set_result(Written(in_order, group.version))

    def _fail(self, error: BaseException) -> None:
        """Everyone who waits is told, and so is everyone who comes later."""
        with self._lock:
            self._failure = EngineError(f"role {self._role}: vLLM stopped ({first_line(error)}).")
            self._failure.__cause__ = error
            waiting: set[_Group | _Call] = {group for group, _ in self._live.values()}
            waiting |= {self._next} if self._next is not None else set()
            while not self._inbox.empty():
                waiting.add(self._inbox.get())
        for work in waiting:
            if not work.done.done():
                work.done.set_exception(self._failure)
