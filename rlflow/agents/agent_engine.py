"""An engine whose responses are episodes of agents, over an engine that generates their calls."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.base import Outcome
from rlflow.agents.episode import Episode
from rlflow.agents.episode_calls import EpisodeCalls
from rlflow.agents.host import AgentHost, EndpointDied
from rlflow.agents.messages import Call, CancelCall, Count, EpisodeEnded
from rlflow.agents.options import AgentOptions
from rlflow.agents.record import CallName, EpisodeRecord
from rlflow.agents.trajectories import Rollout, build_trajectories
from rlflow.agents.worker_process import WorkerDied
from rlflow.batch import Conversations, Packed, Prompts
from rlflow.engines.base import Sampling, sample_seed
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.serving.events import EventThread, Handler
from rlflow.engines.serving.sessions import WAITING_PER_SEQUENCE, SessionEngine
from rlflow.environments.exchange import failure_reason
from rlflow.errors import EngineError, UserError, first_line
from rlflow.rewards.base import Failure

# The time between two looks at the limits of episodes.
_TICK_S = 1.0
# The time in which a worker itself ends an agent that blocks it.
_GRACE_S = 1.0


class AgentEngine(SessionEngine):
    """An engine of episodes over an engine that generates their calls.

    One thread handles all episodes, one kind of event after another.
    """

    def __init__(self, engine: SessionEngine, options: AgentOptions) -> None:
        """Start the endpoint; ``engine`` has a ``tokenizer``. Raises RecipeError and EngineError."""
        self._engine, self._options = engine, options
        self._is_late = Failure("timeout", f"took longer than its timeout_s of {options.timeout_s:g} s")
        self._episodes: dict[str, Episode] = {}
        """The episodes by the names of their attempts."""
        self._interrupted: dict[bytes, Episode] = {}
        """The interrupted episodes by their keys."""
        self._calls = EpisodeCalls(
            engine,
            options.max_calls,
            self._episodes,
            lambda answers: self._host.answer(answers),
            self._receive_call_end,
        )
        self._handlers: dict[type[Any], Handler] = {
            Count: self._count,
            Call: self._calls.take,
            CancelCall: self._calls.cancel,
            EpisodeEnded: self._end_episodes,
            WorkerDied: self._lose_workers,
            EndpointDied: self._replace_endpoint,
        }
        """The handlers of messages from the processes beside this one."""
        handlers: list[Handler] = [
            self._begin,
            self._calls.end,
            *self._handlers.values(),
            self._abort,
            self._check_limits,
        ]
        self._events = EventThread("agents", handlers, self._call)
        self._host = AgentHost(options, engine.tokenizer, self._receive)  # type: ignore[attr-defined]
        threading.Thread(target=_tick, args=(ref(self),), name="agents' clock", daemon=True).start()

    @property
    def capacity(self) -> tuple[int, int]:
        sequences, tokens = self._engine.capacity
        return WAITING_PER_SEQUENCE * sequences, tokens

    @property
    def decode_steps(self) -> int:
        """Return the mean number of tokens so far of an episode that was there all the time."""
        return int(self._calls.tokens_each)

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
            Episode(key, ids[row], data_row, sampling, EpisodeRecord.from_partial(before))
            for row, (key, data_row, before) in enumerate(entries)
        ]
        self._events.post(self._begin, episodes)
        return [episode.future for episode in episodes]

    def interrupted_rows(self, prompts: Prompts, group_size: int) -> NDArray[np.int64]:
        names = set(self._interrupted)
        keys = prompts.repeat(group_size).keys if names else ()
        return np.array([row for row, key in enumerate(keys) if key.tobytes() in names], np.int64)

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        self._events.post(self._abort, futures)
        wait(futures)

    def stop(self) -> None:
        """End the endpoint and the workers, as the end of this object does."""
        self._host.stop()

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Conversations:
        return build_trajectories(samples, responses, sampling.scoring_temperature)

    def _receive(self, messages: Sequence[Any]) -> None:
        """Post what the processes of this host say; other threads call it."""
        for message in messages:
            self._events.post(self._handlers[type(message)], [message])

    def _call(self, handler: Handler, items: list[Any]) -> None:
        try:
            handler(items)
        except BaseException as error:  # without an answer, callers would wait forever
            for episode in list(self._episodes.values()):
                self._fail(episode, error)

    def _receive_call_end(self, episode: Episode, name: CallName, future: "Future[Any]") -> None:
        self._events.post(self._calls.end, [(episode, name, future)])

    def _begin(self, episodes: list[Episode]) -> None:
        """Start episodes, or resume those that are interrupted here."""
        for episode in episodes:
            before = self._interrupted.pop(episode.key.tobytes(), None)
            if before is None:
                self._start(episode)
            elif before.interrupted != episode.record.to_bytes():  # it was at another engine since then
                self._leave(before)
                self._start(episode)
            else:
                before.future, before.sampling, before.interrupted = episode.future, episode.sampling, None
                before.idle_since = time.monotonic()
                self._calls.generate([(before, name) for name in before.waiting])
                self._end_episodes([before.end] if before.end else [])

    def _start(self, episode: Episode) -> None:
        """Start an attempt of an episode with a fresh environment."""
        seed = sample_seed(self._engine.seed, episode.key) >> 1
        try:
            name, worker = self._host.start("-".join(map(str, episode.key.tolist())), episode.row, seed)
        except Exception as error:
            self._fail(episode, error)
            return
        episode.begin_attempt(name, worker, time.monotonic())
        self._episodes[name] = episode

    def _count(self, counts: list[Count]) -> None:
        for count in counts:
            if (episode := self._episodes.get(count.episode)) is not None:
                episode.measures[count.name] += int(count.value)
                episode.is_refused |= count.name == "refused_context"

    def _end_episodes(self, ended: list[EpisodeEnded]) -> None:
        """Complete episodes that agents have ended."""
        if not self._host.has_endpoint:
            return  # Without it, agents fail that are not to blame. All start again when it is replaced.
        self._host.note_ends(ended)
        for message in ended:
            episode = self._episodes.get(message.episode)
            if episode is None:
                continue
            if not episode.is_live:
                episode.end = message
            elif episode.is_late:
                self._retry(episode, self._is_late)
            elif isinstance(message.outcome, Failure) and not episode.is_refused:
                self._retry(episode, message.outcome)
            elif not any(True for _ in episode.record.done_calls()):
                self._retry(episode, Failure("invalid", "ended without a reply of the model"))
            else:
                # A program that fails because a limit refused its call is cut there.
                outcome = Outcome() if isinstance(message.outcome, Failure) else message.outcome
                outcome = replace(outcome, finished=outcome.finished and not episode.is_refused)
                self._complete(episode, outcome, message.call_rewards)

    def _complete(
        self, episode: Episode, outcome: Outcome | None, call_rewards: Mapping[str, float], reason: str = ""
    ) -> None:
        self._calls.stop([(episode, name) for name in list(episode.generating)])
        self._leave(episode)
        try:
            rewards = episode.call_rewards(call_rewards)
        except LookupError as error:
            self._retry(episode, Failure("invalid", f"gave a reward to a call that it has not made ({error.args[0]})"))
            return
        measures = {**episode.all_measures(), **(outcome.metrics if outcome else {})}
        episode.future.set_result(Rollout(episode.record, outcome, reason, rewards, measures))

    def _retry(self, episode: Episode, failure: Failure) -> None:
        """Try an episode again that has failed, or end it for good."""
        self._leave(episode)
        episode.num_failures += 1
        options = self._options
        if episode.num_failures <= options.retries:
            self._start(episode)
            return
        try:
            reason = failure_reason(options.environment, options.on_failure, failure)
        except (UserError, EngineError) as error:
            self._fail(episode, error)
        else:
            self._complete(episode, None, {}, reason)

    def _restart(self, episode: Episode) -> None:
        """Start an episode again that is not to blame for its end."""
        self._leave(episode)
        self._start(episode)

    def _leave(self, episode: Episode) -> None:
        """End an attempt: nobody listens to its agent any more."""
        if self._episodes.pop(episode.name, None) is not None:
            assert episode.worker is not None
            self._host.stop_episode(episode.name, episode.worker)
        if self._interrupted.get(episode.key.tobytes()) is episode:
            del self._interrupted[episode.key.tobytes()]

    def _fail(self, episode: Episode, error: BaseException) -> None:
        self._leave(episode)
        if not isinstance(error, EngineError | UserError):
            cause, error = error, EngineError(f"agents: {first_line(error)}.")
            error.__cause__ = cause
        if not episode.future.done():
            episode.future.set_exception(error)

    def _abort(self, futures: "list[Future[Any]]") -> None:
        """Interrupt episodes where they are."""
        chosen = set(futures)
        episodes = [episode for episode in self._episodes.values() if episode.is_live and episode.future in chosen]
        self._calls.stop([(episode, name) for episode in episodes for name in list(episode.generating)])
        for episode in episodes:
            record = episode.record.copy()
            episode.interrupted, episode.idle_since = record.to_bytes(), time.monotonic()
            self._interrupted[episode.key.tobytes()] = episode
            episode.future.set_result(Rollout(record))

    def _check_limits(self, _: list[None]) -> None:
        """End attempts whose agents take too long, and interrupted episodes that nobody resumes."""
        if not self._host.check():
            for episode in self._episodes.values():  # no agent is late while its calls wait for the endpoint
                episode.idle_since = time.monotonic()
        late = time.monotonic() - self._options.timeout_s - _GRACE_S
        for episode in [episode for episode in self._episodes.values() if episode.idle_since < late]:
            if not episode.is_live:
                self._leave(episode)
            elif not episode.waiting and not episode.is_late:
                assert episode.worker is not None
                episode.is_late = True
                episode.worker.stop(episode.name)

    def _lose_workers(self, lost: list[WorkerDied]) -> None:
        """Start the episodes of dead workers again.

        The one that was running is to blame; if it was none, for example because a tool did it, all that did not wait
        for the model.
        """
        for death in lost:
            for episode in filter(None, map(self._episodes.get, sorted(death.worker.episodes))):
                if not episode.is_live:
                    self._leave(episode)
                elif episode.waiting or death.running not in ("", episode.name):
                    self._restart(episode)
                elif episode.is_late or death.is_blocked:
                    self._retry(episode, self._is_late)
                else:
                    self._retry(episode, Failure("died", f"ended its process ({death.end})"))

    def _replace_endpoint(self, lost: list[EndpointDied]) -> None:
        """Start another endpoint, and all episodes again. They are answered from their records."""
        if not self._host.replace_endpoint(lost):
            return
        for episode in list(self._episodes.values()):
            if episode.is_live:
                self._restart(episode)
            else:
                self._leave(episode)


def _tick(engine: "ref[AgentEngine]") -> None:
    """Look at the limits of an engine's episodes from time to time, as long as there is the engine."""
    while (alive := engine()) is not None:
        alive._events.post(alive._check_limits, [None])
        del alive
        time.sleep(_TICK_S)
