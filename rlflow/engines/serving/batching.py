"""A thread that owns vLLM's engine and works on the requests of all callers together."""

import threading
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.serving.activity import EngineActivity, Recorder, core_of
from rlflow.errors import EngineError, first_line

Result = TypeVar("Result")

# An idle engine waits so long for more: prompts that are read together are read faster than one after another.
_TOGETHER_S = 0.01


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    params: Any
    """vLLM's SamplingParams."""
    begun: PartialResponse = NO_RESPONSE
    """The end of ``prompt_ids``, where that is the beginning of the response."""


@dataclass(frozen=True)
class Written:
    """The response to one request."""

    output: Any
    """vLLM's CompletionOutput."""
    version: int
    """Of the weights that wrote it."""
    begun: PartialResponse = NO_RESPONSE
    """What was written before the request."""

    @property
    def length(self) -> int:
        """Its tokens, those before the request included."""
        return len(self.begun.ids) + len(self.output.token_ids)

    @property
    def is_done(self) -> bool:
        """Not so if it was broken off."""
        return self.output.finish_reason in ("stop", "length")


@dataclass(eq=False)
class _Group:
    """Requests that came together; their answers are told as they are there."""

    requests: Sequence[Request]
    answers: "list[Future[Written]]"
    version: int = 0

    def fail(self, error: BaseException) -> None:
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(error)


@dataclass(eq=False)
class _Call:
    function: Callable[[Any], Any]
    at_once: bool = False
    """It does not wait for requests before it."""
    done: "Future[Any]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Batcher:
    """Work is begun in the order in which it comes: a call waits for requests before it, and those after it wait."""

    version: int | None = 0
    """Of the weights; None while they are not whole. Set by calls."""
    adapters: Any = None
    """vLLM's LoRARequest, with which each request is written; None: the model alone. Set by calls."""
    asleep: bool = False
    """Set by calls."""
    decode_steps: int = 0
    """So many tokens has the engine written of a request that it had from the beginning."""

    def __init__(self, role: str, start: Callable[[], Any]) -> None:
        """``start`` makes vLLM's engine, which is used from this thread alone. Raises what it raises."""
        self._role = role
        self._inbox: SimpleQueue[_Group | _Call] = SimpleQueue()
        self._next: _Group | _Call | None = None
        self._live: dict[str, tuple[_Group, int]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._failure: EngineError | None = None
        self._recorder: Recorder | None = None
        started: Future[None] = Future()
        threading.Thread(target=self._serve, args=(start, started), name=f"{role} vllm", daemon=True).start()
        started.result()

    def submit(self, requests: Sequence[Request]) -> "list[Future[Written]]":
        """The answer to each request, when it is there. They are refused together. May be called from any thread; the
        answers' callbacks run in the engine's, which they keep waiting. Raises EngineError, as the answers do."""
        group = _Group(requests, [Future() for _ in requests])
        self._put(group)
        return group.answers

    def call(self, function: Callable[[Any], Result]) -> Result:
        """What ``function`` makes of vLLM's engine while it works on nothing else. Raises what it raises."""
        result: Result = self._called(_Call(function))
        return result

    def abort(self, answers: "Collection[Future[Written]]") -> None:
        """The requests of these answers end as far as they are. Returns when they have been answered."""
        wanted = set(answers)
        self._called(_Call(lambda engine: self._abort(engine, wanted), at_once=True))

    def _called(self, call: _Call) -> Any:
        self._put(call)
        return call.done.result()

    def take_activity(self) -> list[EngineActivity]:
        """What the engine did since this was last asked, while it had work."""
        return self._recorder.take() if self._recorder else []

    def _put(self, work: _Group | _Call) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inbox.put(work)

    def _serve(self, start: Callable[[], Any], started: "Future[None]") -> None:
        try:
            engine = start()
            self._recorder = recorder = Recorder(engine)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while True:
                self._admit(engine)
                finished = [output for output in engine.step() if output.finished]
                self.decode_steps += 1
                recorder.stepped(finished, idle=len(finished) == len(self._live))
                for output in finished:
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
                        assert self._recorder is not None
                        self._recorder.begin()
                    else:
                        self._next = self._inbox.get(block=idle, timeout=_TOGETHER_S)
                except Empty:
                    return
            if isinstance(self._next, _Group):
                self._add(engine, self._next)
            elif self._live and not self._next.at_once:
                return
            else:
                if not self._next.at_once:
                    drain(engine)
                self._run(engine, self._next)
            self._next = None

    def _add(self, engine: Any, group: _Group) -> None:
        if self.version is None or self.asleep:
            why = "it is asleep" if self.asleep else "its weights are not whole: no copy has come through"
            group.fail(EngineError(f"role {self._role}: nothing is generated, {why}."))
            return
        group.version = self.version
        names = [str(self._count + index) for index in range(len(group.requests))]
        self._count += len(names)
        try:
            for name, request in zip(names, group.requests, strict=True):
                given = {"prompt_token_ids": request.prompt_ids}
                engine.add_request(name, given, request.params, lora_request=self.adapters)
        except Exception as error:  # vLLM refuses in many ways what is wrong with one request
            engine.abort_request(names)
            refused = EngineError(f"role {self._role}: vLLM does not take a request ({first_line(error)}).")
            refused.__cause__ = error
            group.fail(refused)
            return
        self._live |= {name: (group, index) for index, name in enumerate(names)}

    def _run(self, engine: Any, call: _Call) -> None:
        try:
            call.done.set_result(call.function(engine))
        except BaseException as error:
            call.fail(error)

    def _abort(self, engine: Any, wanted: "Set[Future[Written]]") -> None:
        names = {name for name, (group, index) in self._live.items() if group.answers[index] in wanted}
        outputs = outputs_so_far(engine, names)
        engine.abort_request(list(names))
        for output in outputs:
            self._finish(output)
        if outputs and self._recorder is not None:
            self._recorder.stepped(outputs, idle=not self._live)

    def _finish(self, output: Any) -> None:
        group, index = self._live.pop(output.request_id)
        begun = group.requests[index].begun
        group.answers[index].set_result(Written(output.outputs[0], group.version, begun))

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
            work.fail(self._failure)


def drain(engine: Any) -> None:
    """Step until nothing is on its way.

    On GPUs vLLM schedules a step before it has read the last one, so all requests may be answered while a step for them
    is still running. It must end before its memory is given up or its weights change.
    """
    core = core_of(engine)
    while core is not None and (core.scheduler.has_requests() or core.batch_queue):
        engine.step()


def outputs_so_far(engine: Any, names: Collection[str]) -> list[Any]:
    """vLLM's RequestOutputs of these requests, which are not done, as if they were."""
    from vllm.v1.engine import FinishReason

    states = engine.output_processor.request_states.values()
    asked = [state for state in states if state.external_req_id in names]
    return [state.make_request_output([], None, FinishReason.ABORT, None) for state in asked]
