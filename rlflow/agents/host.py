"""The processes beside an engine: its endpoint, and the workers in which agents run."""

import weakref
from collections.abc import Callable, Sequence
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
from rlflow.agents.worker_pool import AgentWorker, WorkerPool
from rlflow.errors import EngineError
from rlflow.rewards.base import Row
from rlflow.system.processes import num_own_cpus

# Endpoints that may die between two episodes that end, before the engine gives up.
_MAX_ENDPOINTS = 20


@dataclass(frozen=True)
class WorkerDied:
    """A worker process has ended."""

    worker: AgentWorker
    end: str
    """The way in which it ended."""


@dataclass(frozen=True)
class EndpointDied:
    """An endpoint process has ended."""

    number: int
    """Its number among those of this engine."""


class AgentHost:
    """The endpoint and the workers of one engine, which end with it. One thread calls the methods."""

    def __init__(self, options: AgentOptions, tokenizer: Any, receive: Callable[[Sequence[Any]], None]) -> None:
        """Start the endpoint. Raises RecipeError and EngineError.

        Other threads call the method ``receive`` with messages of the endpoint and the workers, and with deaths of
        these, as long as there is its object.
        """
        receive = _weak(receive)
        self._receive = receive
        folder = mkdtemp(prefix="rlflow-agents-")
        self._remove_folder = weakref.finalize(self, rmtree, folder, ignore_errors=True)
        tokenizer.save_pretrained(folder)
        limits = options.max_tokens, options.turn_tokens
        self._model = ModelSpec(folder, "policy", *limits, options.template_options)
        self.num_endpoints = self._num_lost = 0
        self._endpoint = self._start_endpoint()
        spec = AgentSpec(options.environment, options.options, options.timeout_s)

        # The threads of this host hold what they call: none may hold the host.
        def receive_death(worker: AgentWorker, end: str) -> None:
            receive([WorkerDied(worker, end)])

        self._pool = WorkerPool(spec, options.processes or num_own_cpus(), receive, receive_death)

    def start(self, prefix: str, row: Row, seed: int) -> tuple[str, AgentWorker]:
        """Start an episode; return a name of its own with this prefix, and its worker. Raises EngineError."""
        name, token = f"{prefix}-{token_hex(6)}", token_hex(32)
        worker = self._pool.next_worker(lambda: ModelService(self._endpoint.url, token_hex(32), self._model))
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
            self._pool.forget(message.episode)
            if isinstance(message.outcome, Outcome):
                self._num_lost = 0

    def check(self) -> bool:
        """Kill processes that hang, and return whether the endpoint has answered lately."""
        self._pool.check()
        return self._endpoint.check()

    def stop(self) -> None:
        """End all processes."""
        self._pool.stop()
        self._endpoint.stop()
        self._remove_folder()

    def replace_endpoint(self) -> None:
        """Start another endpoint, and other workers for those that call the dead one. Raises EngineError."""
        self._num_lost += 1
        if self._num_lost >= _MAX_ENDPOINTS:
            raise EngineError(f"agents: the endpoint has died {self._num_lost} times before an episode ended.")
        self._endpoint = self._start_endpoint()
        self._pool.restart()

    def _start_endpoint(self) -> Endpoint:
        self.num_endpoints += 1
        number, receive = self.num_endpoints, self._receive
        return Endpoint(self._model, receive, lambda reason: receive([EndpointDied(number)]))


def _weak(method: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
    """Return a function that calls a method as long as there is its object."""
    reference = weakref.WeakMethod(method)

    def call(messages: Sequence[Any]) -> None:
        if (bound := reference()) is not None:
            bound(messages)

    return call
