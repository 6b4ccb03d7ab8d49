"""The processes beside an engine: its endpoint, and the workers in which agents run."""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from rlflow.agents.base import ModelService, ModelSpec, Outcome
from rlflow.agents.endpoint.process import Endpoint
from rlflow.agents.messages import CloseEpisode, EpisodeEnded, OpenEpisode, Refusal, Reply, StartEpisode
from rlflow.agents.options import AgentOptions
from rlflow.agents.worker import AgentSpec
from rlflow.agents.worker_process import AgentWorker
from rlflow.errors import EngineError
from rlflow.rewards.base import Row
from rlflow.rewards.workers import ForkServer
from rlflow.system.processes import num_own_cpus

# Endpoints that may die between two episodes that end, before the engine gives up.
_MAX_ENDPOINTS = 20
# How often a worker is started until one gets ready.
_MAX_STARTS = 3


@dataclass(frozen=True)
class EndpointDied:
    """An endpoint process has ended."""

    number: int
    """Its number among those of this engine."""
    reason: str


class AgentHost:
    """The endpoint and the workers of one engine, which end with it. One thread calls the methods.

    Workers start on first use, and one that has died is replaced on the next.
    """

    def __init__(self, options: AgentOptions, tokenizer: Any, receive: Callable[[Sequence[Any]], None]) -> None:
        """Start the endpoint, and load the agent in a fork server. Raises RecipeError and EngineError.

        Other threads call the method ``receive`` with messages of the endpoint and the workers, and with deaths of
        these, as long as there is its object.
        """
        self._receive = _weak(receive)
        folder = mkdtemp(prefix="rlflow-agents-")
        self._remove_folder = weakref.finalize(self, rmtree, folder, ignore_errors=True)
        tokenizer.save_pretrained(folder)
        limits = options.max_tokens, options.turn_tokens
        self._model = ModelSpec(folder, "policy", *limits, options.template_options)
        self.num_endpoints = self._num_lost = 0
        self._endpoint = self._start_endpoint()
        spec = AgentSpec(options.environment, options.options, options.timeout_s)
        spec.load(spec.environment)
        self._fork_server = ForkServer({spec.environment: spec})
        # Threads that read from workers hold the fork server.
        self._stop_workers = weakref.finalize(self, self._fork_server.stop)
        self._workers: list[AgentWorker | None] = [None] * (options.processes or num_own_cpus())

    def start(self, prefix: str, row: Row, seed: int) -> tuple[str, AgentWorker]:
        """Start an episode; return a name of its own with this prefix, and its worker. Raises EngineError."""
        name, token = f"{prefix}-{token_hex(6)}", token_hex(32)
        worker = self._next_worker()
        self._endpoint.send([OpenEpisode(name, token, worker.key)])
        worker.start(StartEpisode(name, token, row, seed))
        return name, worker

    def stop_episode(self, name: str, worker: AgentWorker) -> None:
        """Close an episode: the endpoint refuses its calls, and its worker cancels it unless it has ended."""
        self._endpoint.send([CloseEpisode(name)])
        if name in worker.episodes:
            worker.stop(name)

    @property
    def has_endpoint(self) -> bool:
        """Return False if the endpoint has died, which ``receive`` may hear of later."""
        return not self._endpoint.has_died

    def answer(self, answers: Sequence[Reply | Refusal]) -> None:
        """Answer calls."""
        if answers:
            self._endpoint.send(answers)

    def note_ends(self, ended: Sequence[EpisodeEnded]) -> None:
        """Take note of what workers say about their episodes."""
        for message in ended:
            for worker in filter(None, self._workers):
                worker.forget(message.episode)
            if isinstance(message.outcome, Outcome):
                self._num_lost = 0

    def check(self) -> bool:
        """Kill processes that hang, and return whether the endpoint has answered lately."""
        now = time.monotonic()
        for worker in filter(None, self._workers):
            worker.check(now)
        return self._endpoint.check()

    def stop(self) -> None:
        """End all processes."""
        self._stop_workers()
        self._endpoint.stop()
        self._remove_folder()

    def replace_endpoint(self, lost: Sequence[EndpointDied]) -> bool:
        """Start another endpoint, and other workers for those that call the dead one. Raises EngineError.

        Returns False if the dead one is replaced already.
        """
        if all(death.number != self.num_endpoints for death in lost):
            return False
        self._num_lost += 1
        if self._num_lost >= _MAX_ENDPOINTS:
            times = f"{self._num_lost} times before an episode ended"
            raise EngineError(f"agents: the endpoint has died {times}, last with: {lost[-1].reason}.")
        self._endpoint = self._start_endpoint()
        for worker in filter(None, self._workers):
            worker.kill()
        self._workers = [None] * len(self._workers)
        return True

    def _start_endpoint(self) -> Endpoint:
        self.num_endpoints += 1
        # Its threads hold what they call: none may hold this object.
        number, receive = self.num_endpoints, self._receive
        return Endpoint(self._model, receive, lambda reason: receive([EndpointDied(number, reason)]))

    def _next_worker(self) -> AgentWorker:
        """Return the worker with the fewest episodes. Raises EngineError."""
        loads = [len(worker.episodes) if worker and not worker.has_died else 0 for worker in self._workers]
        number = loads.index(min(loads))
        worker = self._workers[number]
        if worker is None or worker.has_died:
            worker = self._workers[number] = self._start_worker()
        return worker

    def _start_worker(self) -> AgentWorker:
        for _ in range(_MAX_STARTS - 1):
            with suppress(EngineError):  # it was not ready in time, or was killed before
                return self._fork_worker()
        return self._fork_worker()

    def _fork_worker(self) -> AgentWorker:
        service = ModelService(self._endpoint.url, token_hex(32), self._model)
        return AgentWorker(self._fork_server, service, self._receive)


def _weak(method: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
    """Return a function that calls a method as long as there is its object."""
    reference = weakref.WeakMethod(method)

    def call(messages: Sequence[Any]) -> None:
        if (bound := reference()) is not None:
            bound(messages)

    return call
