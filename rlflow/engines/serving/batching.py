"""A thread that owns vLLM's engine, and batches the requests of all callers together."""

import threading
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlflow.batch.routing import Routing, keep_first
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.serving.activity import ActivityRecorder, EngineActivity, find_core
from rlflow.engines.vision.passes import ServedImages
from rlflow.errors import EngineError, first_line
from rlflow.system.compat.vllm import image_prompt, partial_output

Result = TypeVar("Result")
ReadRouting = Callable[[Any, Sequence[Any]], Sequence[Routing | None]]
"""Returns the experts of all tokens but the last of requests, from vLLM's engine and their RequestOutputs."""

# How long an idle engine waits for more requests: reading prompts together is faster than one after another.
_GATHER_S = 0.01
# How often the requests of a group are submitted again after vLLM has lost some of them.
_MAX_RETRIES = 3


@dataclass(frozen=True)
class Request:
    """A request for one response."""

    prompt_ids: list[int]
    params: Any
    """vLLM's SamplingParams."""
    partial: PartialResponse = NO_RESPONSE
    """The part of the response that is already generated, with which ``prompt_ids`` end."""
    images: ServedImages | None = None
    """The images of the prompt."""


@dataclass(frozen=True)
class Response:
    """The response to one request."""

    output: Any
    """vLLM's CompletionOutput."""
    version: int
    """The version of the weights that generated it."""
    partial: PartialResponse = NO_RESPONSE
    """The part of the response that was generated before the request."""
    routing: Routing | None = None
    """The experts of all tokens but the last, from the first token of the prompt on."""

    @property
    def length(self) -> int:
        """Return the number of its tokens, including those before the request."""
        return len(self.partial.ids) + len(self.output.token_ids)

    @property
    def is_done(self) -> bool:
        """Return False for a response that was aborted."""
        return self.output.finish_reason in ("stop", "length")


@dataclass(eq=False)
class _RequestGroup:
    """Requests that were submitted together. Each future completes as soon as its response does."""

    requests: Sequence[Request]
    futures: "list[Future[Response]]"
    version: int = 0
    num_retries: int = 0

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


@dataclass(eq=False)
class _Call:
    """A function to be called with vLLM's engine."""

    function: Callable[[Any], Any]
    is_urgent: bool = False
    """True for a call that does not wait for the requests before it."""
    future: "Future[Any]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Batcher:
    """A queue of requests and calls for one engine, worked on in the order in which they arrive.

    A call waits for the requests before it, and the requests after it wait for the call.
    """

    version: int | None = 0
    """The version of the weights; None while they are incomplete. Set by calls."""
    adapters: Any = None
    """vLLM's LoRARequest for all requests; None to generate with the model alone. Set by calls."""
    asleep: bool = False
    """True while the engine sleeps. Set by calls."""
    decode_steps: int = 0
    """The number of tokens that the engine has generated for a request that was there all the time."""

    def __init__(self, role: str, start: Callable[[], Any], read_routing: ReadRouting | None = None) -> None:
        """Create vLLM's engine by ``start``, in the thread that will use it. Raises the errors of ``start``."""
        self._role, self._read_routing = role, read_routing
        self._inbox: SimpleQueue[_RequestGroup | _Call] = SimpleQueue()
        self._next: _RequestGroup | _Call | None = None
        self._live: dict[str, tuple[_RequestGroup, int]] = {}
        self._num_requests = 0
        self._lock = threading.Lock()
        self._failure: EngineError | None = None
        started: Future[None] = Future()
        threading.Thread(target=self._serve, args=(start, started), name=f"{role} vllm", daemon=True).start()
        started.result()

    def submit(self, requests: Sequence[Request]) -> "list[Future[Response]]":
        """Submit requests, and return a future for each response. If vLLM refuses one, all of them fail.

        May be called from any thread. Callbacks of the futures run in the engine's thread, and block it. Raises
        EngineError, as the futures do.
        """
        group = _RequestGroup(requests, [Future() for _ in requests])
        self._enqueue(group)
        return group.futures

    def call(self, function: Callable[[Any], Result]) -> Result:
        """Call ``function`` with vLLM's engine while it has no requests; return its result, or raise its error."""
        result: Result = self._wait_for(_Call(function))
        return result

    def call_now(self, function: Callable[[Any], Result]) -> Result:
        """Call ``function`` with vLLM's engine between two steps, whatever its requests; otherwise like ``call``."""
        result: Result = self._wait_for(_Call(function, is_urgent=True))
        return result

    def abort(self, futures: "Collection[Future[Response]]") -> None:
        """End the responses of these futures where they are. Returns when the futures have completed."""
        aborted = set(futures)
        self.call_now(lambda engine: self._abort(engine, aborted))

    def take_activity(self) -> list[EngineActivity]:
        """Return what the engine did since the last call."""
        return self._recorder.take()

    def _wait_for(self, call: _Call) -> Any:
        self._enqueue(call)
        return call.future.result()

    def _enqueue(self, work: _RequestGroup | _Call) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inbox.put(work)

    def _serve(self, start: Callable[[], Any], started: "Future[None]") -> None:
        """Run the engine's thread: admit work, step, and complete the futures of finished requests."""
        try:
            engine = start()
            self._recorder = ActivityRecorder(engine)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while True:
                self._admit(engine)
                finished = [output for output in engine.step() if output.finished]
                self.decode_steps += 1
                self._recorder.record_step(finished, idle=len(finished) == len(self._live))
                self._complete(engine, finished)
                if self._live and _is_idle(engine):
                    self._retry_lost(engine)
        except BaseException as error:  # without an answer, callers would wait forever
            self._fail(error)

    def _admit(self, engine: Any) -> None:
        """Start the work in the queue, and wait for some if there is none."""
        idle = not self._live
        while True:
            if self._next is None:
                try:
                    if not self._live:
                        self._next = self._inbox.get()
                        self._recorder.resume()
                    else:
                        self._next = self._inbox.get(block=idle, timeout=_GATHER_S)
                except Empty:
                    return
            if isinstance(self._next, _RequestGroup):
                self._add(engine, self._next)
            elif self._live and not self._next.is_urgent:
                return
            else:
                if not self._next.is_urgent:
                    drain(engine)
                self._run(engine, self._next)
            self._next = None

    def _add(self, engine: Any, group: _RequestGroup) -> None:
        if self.version is None or self.asleep:
            why = "it is asleep" if self.asleep else "its weights are incomplete, because no weight sync has succeeded"
            group.fail(EngineError(f"role {self._role}: it cannot generate: {why}."))
            return
        group.version = self.version
        self._start(engine, group, range(len(group.requests)))

    def _start(self, engine: Any, group: _RequestGroup, indices: Sequence[int]) -> None:
        """Have vLLM start these requests of the group. If it refuses one, the whole group fails."""
        names = [str(self._num_requests + number) for number in range(len(indices))]
        self._num_requests += len(names)
        try:
            for name, index in zip(names, indices, strict=True):
                request = group.requests[index]
                engine.add_request(name, _prompt(engine, request), request.params, lora_request=self.adapters)
        except Exception as error:  # vLLM raises errors of many kinds for an invalid request
            engine.abort_request(names)
            refused = EngineError(f"role {self._role}: vLLM refuses a request ({first_line(error)}).")
            refused.__cause__ = error
            group.fail(refused)
            return
        self._live |= {name: (group, index) for name, index in zip(names, indices, strict=True)}

    def _retry_lost(self, engine: Any) -> None:
        """Submit the requests again that nobody has answered although vLLM has nothing left to do.

        Seeds belong to the requests, so they get the same responses. Requests that are lost every time fail.
        """
        lost, self._live = self._live, {}
        engine.abort_request(list(lost))
        indices: dict[_RequestGroup, list[int]] = {}
        for group, index in lost.values():
            indices.setdefault(group, []).append(index)
        for group, of_group in indices.items():
            group.num_retries += 1
            if group.num_retries > _MAX_RETRIES:
                what = f"vLLM has lost {len(of_group)} of {len(group.requests)} requests {group.num_retries} times"
                group.fail(EngineError(f"role {self._role}: {what}."))
            else:
                self._start(engine, group, of_group)

    def _run(self, engine: Any, call: _Call) -> None:
        try:
            call.future.set_result(call.function(engine))
        except BaseException as error:
            call.fail(error)

    def _abort(self, engine: Any, futures: "Set[Future[Response]]") -> None:
        names = {name for name, (group, index) in self._live.items() if group.futures[index] in futures}
        outputs = partial_outputs(engine, names)
        engine.abort_request(list(names))
        self._complete(engine, outputs)
        if outputs:
            self._recorder.record_step(outputs, idle=not self._live)

    def _complete(self, engine: Any, outputs: Sequence[Any]) -> None:
        routing = [None] * len(outputs) if self._read_routing is None else self._read_routing(engine, outputs)
        for output, records in zip(outputs, routing, strict=True):
            group, index = self._live.pop(output.request_id)
            request = group.requests[index]
            records = keep_first(records, request.partial.routing, len(request.prompt_ids) - 1)
            group.futures[index].set_result(Response(output.outputs[0], group.version, request.partial, records))

    def _fail(self, error: BaseException) -> None:
        """Fail everything that waits, and everything that is submitted from now on."""
        with self._lock:
            self._failure = EngineError(f"role {self._role}: vLLM stopped ({first_line(error)}).")
            self._failure.__cause__ = error
            waiting: set[_RequestGroup | _Call] = {group for group, _ in self._live.values()}
            waiting |= {self._next} if self._next is not None else set()
            while not self._inbox.empty():
                waiting.add(self._inbox.get())
        for work in waiting:
            work.fail(self._failure)


def _prompt(engine: Any, request: Request) -> Any:
    """Return the prompt of a request as vLLM takes it."""
    ids, images = request.prompt_ids, request.images
    if images is None:
        return {"prompt_token_ids": ids}
    return image_prompt(engine, ids, images.fields, images.digests, images.places)


def drain(engine: Any) -> None:
    """Step until nothing is running.

    On GPUs vLLM schedules a step before it has read the results of the last one, so a step may still be running when
    all requests are finished. It must end before its memory is released or its weights change.
    """
    while not _is_idle(engine):
        engine.step()


def _is_idle(engine: Any) -> bool:
    """Return whether vLLM has no requests, and no step is running."""
    core = find_core(engine)
    if core is None:
        return not engine.has_unfinished_requests()
    return not (core.scheduler.has_requests() or core.batch_queue)


def partial_outputs(engine: Any, names: Collection[str]) -> list[Any]:
    """Return vLLM's RequestOutputs of unfinished requests, as if they had finished."""
    states = engine.output_processor.request_states.values()
    unfinished = [state for state in states if state.external_req_id in names]
    return [partial_output(state) for state in unfinished]
