"""An engine whose responses are episodes of agents, over an engine that generates their calls."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
from rlflow.environments.transcript import piece_of
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
    attempt: int = 0
    is_parked: bool = False
    """It is interrupted, but its agent goes on as far as it can without the model."""
    numbers: dict[int, CallName] = field(default_factory=dict)
    """The calls of this attempt by the numbers of the endpoint."""
    waiting: dict[CallName, list[int]] = field(default_factory=dict)
    """The numbers that wait for calls which are not done."""
    generating: "dict[CallName, Future[Any]]" = field(default_factory=dict)
    end: EpisodeEnded | None = None
    """What the agent said while the episode was parked."""
    idle_since: float = field(default_factory=time.monotonic)
    """The time of the last answer, or of the interruption."""
    counts: Counter[str] = field(default_factory=Counter)


class AgentEngine(SessionEngine):
    """An engine of episodes over an engine that generates their calls.

    One thread handles all episodes, one kind of event after another.
    """

    def __init__(self, engine: SessionEngine, options: AgentOptions, template_options: Any = None) -> None:
        """Start the endpoint; ``engine`` has a ``tokenizer``. Raises RecipeError and EngineError."""
        self._engine, self._options = engine, options
        self._folder = TemporaryDirectory(prefix="rlflow-agents-")
        engine.tokenizer.save_pretrained(self._folder.name)  # type: ignore[attr-defined]
        self._model = ModelSpec(
            self._folder.name, "policy", options.max_tokens, options.turn_tokens, dict(template_options or {})
        )
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
            self._tick,
        )
        self._events = EventThread("agents", handlers, self._call)
        self._episodes: dict[str, _Episode] = {}
        """The live and parked episodes by the names of their attempts."""
        self._parked: dict[bytes, _Episode] = {}
        """Those that are parked, by their keys."""
        self._tokens_each = 0.0
        self._recorded: dict[tuple[int, int], Any] = {}
        """What the journal had of the calls of a step, by the step and the version of the weights."""
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
        live = [episode for episode in list(self._episodes.values()) if not episode.is_parked]
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
        return Endpoint(self._model, self._receive_calls, lambda reason: self._events.post(self._replace_endpoint, [number]))

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

    # Handlers.

    def _begin(self, episodes: list[_Episode]) -> None:
        """Start episodes, or go on with those that are parked here."""
        for episode in episodes:
            parked = self._parked.pop(episode.key.tobytes(), None)
            if parked is not None and parked.record.to_bytes() == episode.record.to_bytes():
                parked.future, parked.sampling, parked.is_parked = episode.future, episode.sampling, False
                parked.idle_since = time.monotonic()
                self._submit([(parked, name) for name in parked.waiting])
                if parked.end is not None:
                    self._end_episodes([parked.end])
                continue
            if parked is not None:
                self._drop(parked)
            self._start(episode)

    def _start(self, episode: _Episode) -> None:
        """Start an attempt of an episode with a fresh environment."""
        key = "-".join(str(part) for part in episode.key.tolist())
        episode.name, token = f"{key}-{token_hex(6)}", token_hex(32)
        episode.record.begin_attempt()
        episode.numbers, episode.waiting, episode.end = {}, {}, None
        episode.idle_since = time.monotonic()
        self._episodes[episode.name] = episode
        worker = episode.worker = self._pool.next_worker(
            lambda: ModelService(self._endpoint.url, token_hex(32), self._model)
        )
        self._endpoint.send([OpenEpisode(episode.name, token, worker.key)])
        worker.start(StartEpisode(episode.name, token, episode.row, sample_seed(0, episode.key) >> 1))

    def _count(self, counts: list[Count]) -> None:
        for count in counts:
            if (episode := self._episodes.get(count.episode)) is not None:
                episode.counts[count.name] += count.value  # type: ignore[assignment]

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
            if name not in record.used:
                if refusal := self._refusal(call.number, len(record.used), len(ids)):
                    answers.append(refusal)
                    continue
                record.used[name] = None
            recorded = record.calls.setdefault(name, RecordedCall())
            recorded.prompt_ids, recorded.limit = ids, min(call.max_tokens, self._options.max_tokens - len(ids))
            episode.numbers[call.number] = name
            if recorded.is_done:
                episode.counts["recorded_calls"] += 1
                answers.append(_reply(call.number, recorded))
                continue
            episode.waiting.setdefault(name, []).append(call.number)
            if name not in episode.generating and not episode.is_parked:
                new.append((episode, name))
        self._endpoint.send(answers)
        self._submit(new)

    def _refusal(self, number: int, num_calls: int, num_tokens: int) -> Refusal | None:
        if num_calls >= self._options.max_calls:
            return Refusal(number, "calls", f"the episode has made its {num_calls} calls (max_calls)")
        if num_tokens >= self._options.max_tokens:
            fact = f"a prompt of {num_tokens} tokens leaves no room for a reply in {self._options.max_tokens} (max_tokens)"
            return Refusal(number, "context", fact)
        return None

    def _submit(self, calls: Sequence[tuple[_Episode, CallName]]) -> None:
        """Generate calls, or find them in the journal."""
        by_sampling: dict[Sampling, list[tuple[_Episode, CallName]]] = {}
        for episode, name in calls:
            sampling = replace(
                episode.sampling, max_tokens=episode.record.calls[name].limit, turns=None, group_size=1
            )
            by_sampling.setdefault(sampling, []).append((episode, name))
        for sampling, group in by_sampling.items():
            self._generate(sampling, group)

    def _generate(self, sampling: Sampling, calls: list[tuple[_Episode, CallName]]) -> None:
        keys = np.stack([call_key(episode.key, name) for episode, name in calls])
        recorded = [episode.record.calls[name] for episode, name in calls]
        prompts = Prompts(
            keys=keys,
            ids=Packed.from_rows([call.prompt_ids for call in recorded], np.int32),
            rows=({},) * len(calls),
        )
        partial = [call.reply for call in recorded]
        resumes = any(len(reply.ids) for reply in partial)
        futures = self._engine.submit(prompts, sampling, partial if resumes else None)
        for (episode, name), future in zip(calls, futures, strict=True):
            episode.generating[name] = future
            future.add_done_callback(bind(self._note_call, episode, name))

    def _note_call(self, episode: _Episode, name: CallName, future: "Future[Any]") -> None:
        self._events.post(self._end_calls, [(episode, name, future)])
