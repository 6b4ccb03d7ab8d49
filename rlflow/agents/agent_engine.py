"""An engine whose responses are episodes of agents, over an engine that generates their calls."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial as bind
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.base import ModelService, ModelSpec, Outcome
from rlflow.agents.call_generator import CallGenerator, CallRequest
from rlflow.agents.endpoint.process import Endpoint
from rlflow.agents.episode import Rollout, build_trajectories
from rlflow.agents.messages import (
    Call,
    CancelCall,
    CloseEpisode,
    Count,
    EpisodeEnded,
    OpenEpisode,
    Refusal,
    Reply,
    StartEpisode,
)
from rlflow.agents.options import AgentOptions
from rlflow.agents.record import CallName, EpisodeRecord, RecordedCall, call_key
from rlflow.agents.worker import AgentSpec
from rlflow.agents.worker_pool import Worker, WorkerPool
from rlflow.batch import Conversations, Packed, Prompts
from rlflow.engines.base import Sampling, sample_seed
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.serving.events import EventThread, Handler
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.environments.exchange import failure_reason
from rlflow.errors import EngineError, UserError, first_line
from rlflow.rewards.base import Failure, Row
from rlflow.system.processes import num_own_cpus

# Episodes for each sample that the engine can generate at once: those that wait for their agents need room in the cache
# alone.
_PER_SEQUENCE = 16
# The time between two looks at the limits of episodes.
_TICK_S = 1.0
# Endpoints that may die before the engine gives up.
_MAX_ENDPOINTS = 20


@dataclass(eq=False)
class _Episode:
    """An episode that an engine holds, live or parked."""

    key: NDArray[np.int64]
    prompt_ids: NDArray[np.int32]
    row: Row
    sampling: Sampling
    record: EpisodeRecord
    future: "Future[Rollout]" = field(default_factory=Future)
    name: str = ""
    """The name of this attempt."""
    worker: Worker | None = None
    num_failures: int = 0
    parked: bytes | None = None
    """The record at the moment of an interruption. The agent goes on meanwhile, as far as it can without the model."""
    numbers: dict[int, CallName] = field(default_factory=dict)
    """The calls of this attempt by the numbers of the endpoint."""
    waiting: dict[CallName, list[int]] = field(default_factory=dict)
    """The numbers that wait for calls which are not done."""
    generating: "dict[CallName, tuple[CallRequest, Future[Any]]]" = field(default_factory=dict)
    end: EpisodeEnded | None = None
    """What the agent said while the episode was parked."""
    idle_since: float = 0.0
    """The time of its start, the last answer, or its interruption."""
    measures: Counter[str] = field(default_factory=Counter)

    @property
    def is_live(self) -> bool:
        """Return False for a parked episode."""
        return self.parked is None


class AgentEngine(SessionEngine):
    """An engine of episodes over an engine that generates their calls.

    One thread handles all episodes, one kind of event after another.
    """

    def __init__(self, engine: SessionEngine, options: AgentOptions) -> None:
        """Start the endpoint; ``engine`` has a ``tokenizer``. Raises RecipeError and EngineError."""
        self._engine, self._options = engine, options
        self._calls = CallGenerator(engine)
        self._folder = TemporaryDirectory(prefix="rlflow-agents-")
        engine.tokenizer.save_pretrained(self._folder.name)  # type: ignore[attr-defined]
        limits = options.max_tokens, options.turn_tokens
        self._model = ModelSpec(self._folder.name, "policy", *limits, options.template_options)
        handlers = (
            self._begin,
            self._count,
            self._take_calls,
            self._end_calls,
            self._cancel_calls,
            self._end_episodes,
            self._lose_workers,
            self._replace_endpoint,
            self._abort,
            self._check_limits,
        )
        self._events = EventThread("agents", handlers, self._call)
        self._episodes: dict[str, _Episode] = {}
        """The live and parked episodes by the names of their attempts."""
        self._parked: dict[bytes, _Episode] = {}
        """Those that are parked, by their keys."""
        self._tokens_each = 0.0
        self._num_endpoints = 0
        self._endpoint = self._start_endpoint()
        spec = AgentSpec(options.environment, options.options)
        self._pool = WorkerPool(spec, options.processes or num_own_cpus(), self._receive_ends, self._receive_death)
        threading.Thread(target=_tick, args=(ref(self),), name="agents' clock", daemon=True).start()

    @property
    def capacity(self) -> tuple[int, int]:
        sequences, tokens = self._engine.capacity
        return _PER_SEQUENCE * sequences, tokens

    @property
    def decode_steps(self) -> int:
        """Return the mean number of tokens so far of an episode that was there all the time."""
        return int(self._tokens_each)

    @property
    def progress(self) -> int:
        """Return the seconds of a clock while all episodes wait for their agents, and 0 otherwise."""
        live = [episode for episode in list(self._episodes.values()) if episode.is_live]
        return int(time.monotonic()) if live and not any(episode.generating for episode in live) else 0

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        ids = Packed(samples.ids.values, samples.ids.offsets)
        entries = zip(samples.keys, samples.rows, partial or [NO_RESPONSE] * len(samples), strict=True)
        episodes = [
            _Episode(key, ids[row], data_row, sampling, EpisodeRecord.from_partial(before))
            for row, (key, data_row, before) in enumerate(entries)
        ]
        self._events.post(self._begin, episodes)
        return [episode.future for episode in episodes]

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        self._events.post(self._abort, futures)
        wait(futures)

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Conversations:
        return build_trajectories(samples, responses, sampling.scoring_temperature)

    # Events from other threads.

    def _start_endpoint(self) -> Endpoint:
        self._num_endpoints += 1
        if self._num_endpoints > _MAX_ENDPOINTS:
            raise EngineError(f"agents: the endpoint has died {_MAX_ENDPOINTS} times.")
        number = self._num_endpoints
        return Endpoint(
            self._model, self._receive_calls, lambda reason: self._events.post(self._replace_endpoint, [number])
        )

    def _receive_calls(self, messages: Sequence[Call | CancelCall | Count]) -> None:
        for kind, handler in ((Count, self._count), (Call, self._take_calls), (CancelCall, self._cancel_calls)):
            if chosen := [message for message in messages if isinstance(message, kind)]:
                self._events.post(handler, chosen)

    def _receive_ends(self, messages: list[EpisodeEnded]) -> None:
        self._events.post(self._end_episodes, messages)

    def _receive_death(self, worker: Worker, end: str) -> None:
        self._events.post(self._lose_workers, [(worker, end)])

    def _call(self, handler: Handler, items: list[Any]) -> None:
        try:
            handler(items)
        except BaseException as error:  # without an answer, callers would wait forever
            if not isinstance(error, EngineError | UserError):
                cause, error = error, EngineError(f"agents: {first_line(error)}.")
                error.__cause__ = cause
            for episode in list(self._episodes.values()):
                self._fail(episode, error)

    def _receive_call_end(self, episode: _Episode, name: CallName, future: "Future[Any]") -> None:
        self._events.post(self._end_calls, [(episode, name, future)])

    # Handlers.

    def _begin(self, episodes: list[_Episode]) -> None:
        """Start episodes, or go on with those that are parked here."""
        for episode in episodes:
            parked = self._parked.pop(episode.key.tobytes(), None)
            if parked is None:
                self._start(episode)
            elif parked.parked != episode.record.to_bytes():  # it was at another engine since then
                self._drop(parked)
                self._start(episode)
            else:
                parked.future, parked.sampling, parked.parked = episode.future, episode.sampling, None
                parked.idle_since = time.monotonic()
                self._generate([(parked, name) for name in parked.waiting])
                self._end_episodes([parked.end] if parked.end else [])

    def _start(self, episode: _Episode) -> None:
        """Start an attempt of an episode with a fresh environment."""
        token = token_hex(32)
        episode.name = f"{'-'.join(map(str, episode.key.tolist()))}-{token_hex(6)}"
        episode.record.begin_attempt()
        episode.numbers, episode.waiting, episode.end = {}, {}, None
        episode.idle_since = time.monotonic()
        self._episodes[episode.name] = episode
        worker = episode.worker = self._pool.next_worker(
            lambda: ModelService(self._endpoint.url, token_hex(32), self._model)
        )
        self._endpoint.send([OpenEpisode(episode.name, token, worker.key)])
        seed = sample_seed(self._engine.seed, episode.key) >> 1
        worker.start(StartEpisode(episode.name, token, episode.row, seed))

    def _count(self, counts: list[Count]) -> None:
        for count in counts:
            if (episode := self._episodes.get(count.episode)) is not None:
                episode.measures[count.name] += int(count.value)

    def _take_calls(self, calls: list[Call]) -> None:
        """Answer calls from the record, or generate what they ask for."""
        new: list[tuple[_Episode, CallName]] = []
        answers: list[Reply | Refusal] = []
        for call in calls:
            episode = self._episodes.get(call.episode)
            if episode is None:
                answers.append(Refusal(call.number, "ended", "the episode has ended"))
                continue
            record, ids = episode.record, np.frombuffer(call.prompt_ids, np.int32)
            name = record.name_of(call.prompt_ids, call.max_tokens, call.is_repeated)
            if name not in record.used and (refusal := self._refusal(call.number, len(record.used), len(ids))):
                answers.append(refusal)
                continue
            record.used[name] = None
            recorded = record.calls.get(name, RecordedCall())
            limit = min(call.max_tokens, self._options.turn_tokens, self._options.max_tokens - len(ids))
            record.calls[name] = replace(recorded, prompt_ids=ids, limit=limit)
            episode.numbers[call.number] = name
            if recorded.result.is_done:
                episode.measures["recorded_calls"] += 1
                episode.idle_since = time.monotonic()
                answers.append(_reply(call.number, recorded))
                continue
            episode.waiting.setdefault(name, []).append(call.number)
            if name not in episode.generating and episode.is_live:
                new.append((episode, name))
        self._endpoint.send(answers)
        self._generate(list(dict.fromkeys(new)))

    def _refusal(self, number: int, num_calls: int, num_tokens: int) -> Refusal | None:
        if num_calls >= self._options.max_calls:
            return Refusal(number, "calls", f"the episode has made its {num_calls} calls (max_calls)")
        if num_tokens >= self._options.max_tokens:
            fact = f"a prompt of {num_tokens} tokens leaves no room in {self._options.max_tokens} (max_tokens)"
            return Refusal(number, "context", fact)
        return None

    def _generate(self, calls: Sequence[tuple[_Episode, CallName]]) -> None:
        requests = [_request(episode, name) for episode, name in calls]
        futures = self._calls.submit(requests)
        for (episode, name), request, future in zip(calls, requests, futures, strict=True):
            episode.generating[name] = request, future
            future.add_done_callback(bind(self._receive_call_end, episode, name))

    def _end_calls(self, ended: "list[tuple[_Episode, CallName, Future[Any]]]") -> None:
        """Record what is generated, and answer those who wait for it."""
        new = [
            (episode, name, episode.generating.pop(name)[0], future)
            for episode, name, future in ended
            if episode.generating.get(name, (None, None))[1] is future
        ]
        results = self._calls.results([request for _, _, request, _ in new], [future for *_, future in new])
        answers = []
        for (episode, name, request, _), result in zip(new, results, strict=True):
            recorded = episode.record.calls[name] = replace(episode.record.calls[name], result=result)
            self._count_tokens(len(result.reply.ids) - len(request.partial.ids))
            if result.is_done:
                episode.idle_since = time.monotonic()
                answers += [_reply(number, recorded) for number in episode.waiting.pop(name, ())]
        self._endpoint.send(answers)

    def _cancel_calls(self, cancelled: list[CancelCall]) -> None:
        """Stop generating what nobody waits for. What there is of it stays, in case that the client asks again."""
        numbers = {call.number for call in cancelled}
        for episode in self._episodes.values():
            for number in numbers & episode.numbers.keys():
                name = episode.numbers[number]
                waiting = episode.waiting.get(name, [])
                if number in waiting:
                    waiting.remove(number)
                if not waiting:
                    episode.waiting.pop(name, None)
                    self._stop_generating([(episode, name)] if name in episode.generating else [])

    def _stop_generating(self, calls: Sequence[tuple[_Episode, CallName]]) -> None:
        futures = [episode.generating[name][1] for episode, name in calls]
        self._engine.abort([future for future in futures if not future.done()])
        self._end_calls([(*call, future) for call, future in zip(calls, futures, strict=True)])

    def _end_episodes(self, ended: list[EpisodeEnded]) -> None:
        """Complete episodes that agents have ended."""
        for message in ended:
            self._pool.forget(message.episode)
            episode = self._episodes.get(message.episode)
            if episode is None:
                continue
            if not episode.is_live:
                episode.end = message
            elif isinstance(message.outcome, Failure):
                self._retry(episode, message.outcome)
            elif not any(True for _ in episode.record.done_calls()):
                self._retry(episode, Failure("invalid", "ended without a reply of the model"))
            else:
                self._finish(episode, message.outcome)

    def _finish(self, episode: _Episode, outcome: Outcome | None, reason: str = "") -> None:
        self._stop_generating([(episode, name) for name in list(episode.generating)])
        self._leave(episode)
        calls = {name: call for name, call in episode.record.calls.items() if name in episode.record.used}
        rewards = {name: 0.0 for name, call in calls.items() if call.result.is_done}
        for reply, reward in (outcome.call_rewards if outcome else {}).items():
            name = episode.numbers.get(int(reply.rpartition("-")[2]))
            if name not in rewards:
                fact = f"gave a reward to a call that it has not made ({reply})"
                return self._retry(episode, Failure("invalid", fact))
            rewards[name] += reward
        measures = {**episode.measures, **(outcome.metrics if outcome else {}), "retries": episode.num_failures}
        rollout = Rollout(episode.record, outcome, reason, tuple(rewards.values()), measures)
        episode.future.set_result(rollout)

    def _retry(self, episode: _Episode, failure: Failure) -> None:
        """Try an episode again that has failed, or end it for good."""
        self._leave(episode)
        episode.num_failures += 1
        if episode.num_failures <= self._options.retries:
            return self._start(episode)
        options = self._options
        try:
            reason = failure_reason(options.environment, options.on_failure, failure)
        except UserError as error:
            return self._fail(episode, error)
        self._finish(episode, None, reason)

    def _leave(self, episode: _Episode) -> None:
        """End an attempt: nobody listens to its agent any more."""
        if self._episodes.pop(episode.name, None) is not None:
            self._endpoint.send([CloseEpisode(episode.name)])
            if episode.worker is not None and episode.name in episode.worker.episodes:
                episode.worker.stop(episode.name)

    def _drop(self, episode: _Episode) -> None:
        """End a parked episode, which another engine may have taken over."""
        self._parked.pop(episode.key.tobytes(), None)
        self._leave(episode)

    def _fail(self, episode: _Episode, error: BaseException) -> None:
        self._leave(episode)
        if not episode.future.done():
            episode.future.set_exception(error)

    def _abort(self, futures: "list[Future[Any]]") -> None:
        """Interrupt episodes where they are."""
        chosen = set(futures)
        episodes = [episode for episode in self._episodes.values() if episode.is_live and episode.future in chosen]
        self._stop_generating([(episode, name) for episode in episodes for name in list(episode.generating)])
        for episode in episodes:
            record = episode.record.copy()
            episode.parked, episode.idle_since = record.to_bytes(), time.monotonic()
            self._parked[episode.key.tobytes()] = episode
            episode.future.set_result(Rollout(record))

    def _check_limits(self, _: list[None]) -> None:
        """End attempts whose agents take too long, and parked episodes that nobody goes on with."""
        self._pool.check()
        limit_s = self._options.timeout_s
        late = time.monotonic() - limit_s
        for episode in [episode for episode in self._episodes.values() if episode.idle_since < late]:
            if not episode.is_live:
                self._drop(episode)
            elif not episode.waiting:
                self._retry(episode, Failure("timeout", f"took longer than its timeout_s of {limit_s:g} s"))

    def _lose_workers(self, lost: list[tuple[Worker, str]]) -> None:
        """Start the episodes of dead workers again. One that was waiting for the model is not to blame."""
        for worker, end in lost:
            for episode in filter(None, map(self._episodes.get, sorted(worker.episodes))):
                if not episode.is_live:
                    self._drop(episode)
                elif episode.waiting:
                    self._leave(episode)
                    self._start(episode)
                else:
                    self._retry(episode, Failure("died", f"ended its process ({end})"))

    def _replace_endpoint(self, numbers: list[int]) -> None:
        """Start another endpoint, and all episodes again. They are answered from their records."""
        if self._num_endpoints not in numbers:
            return
        self._endpoint = self._start_endpoint()
        self._pool.restart()
        for episode in list(self._episodes.values()):
            self._leave(episode)
            if episode.is_live:
                self._start(episode)
            else:
                self._drop(episode)

    def _count_tokens(self, number: int) -> None:
        self._tokens_each += number / max(1, len(self._episodes))


def _request(episode: _Episode, name: CallName) -> CallRequest:
    call = episode.record.calls[name]
    assert call.prompt_ids is not None
    sampling = replace(episode.sampling, max_tokens=call.limit, turns=None, group_size=1)
    return CallRequest(call_key(episode.key, name), call.prompt_ids, call.result.reply, sampling)


def _reply(number: int, call: RecordedCall) -> Reply:
    result = call.result
    return Reply(number, result.reply.ids.tobytes(), result.reply.logprobs.tobytes(), result.finished)


def _tick(engine: "ref[AgentEngine]") -> None:
    """Look at the limits of an engine's episodes from time to time, as long as there is the engine."""
    while (alive := engine()) is not None:
        alive._events.post(alive._check_limits, [None])
        del alive
        time.sleep(_TICK_S)
