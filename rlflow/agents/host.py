"""The processes beside an engine: its endpoint, and the workers in which agents run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from rlflow.agents.base import ModelService, ModelSpec
from rlflow.agents.endpoint.process import Endpoint
from rlflow.agents.messages import CloseEpisode, EpisodeEnded, OpenEpisode, Refusal, Reply, StartEpisode
from rlflow.agents.options import AgentOptions
from rlflow.agents.worker import AgentSpec
from rlflow.agents.worker_pool import AgentWorker, WorkerPool
from rlflow.errors import EngineError
from rlflow.rewards.base import Row
from rlflow.system.processes import num_own_cpus

# Endpoints that may die before the engine gives up.
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
    """The endpoint and the workers of one engine. One thread calls the methods."""

    def __init__(self, options: AgentOptions, tokenizer: Any, receive: Callable[[Sequence[Any]], None]) -> None:
        """Start the endpoint. Raises RecipeError and EngineError.

        Other threads call ``receive`` with messages of the endpoint and the workers, and with deaths of these.
        """
        self._receive = receive
        self._folder = TemporaryDirectory(prefix="rlflow-agents-")
        tokenizer.save_pretrained(self._folder.name)
        limits = options.max_tokens, options.turn_tokens
        self._model = ModelSpec(self._folder.name, "policy", *limits, options.template_options)
        self.num_endpoints = 0
        self._endpoint = self._start_endpoint()
        spec = AgentSpec(options.environment, options.options, options.timeout_s)
        self._pool = WorkerPool(spec, options.processes or num_own_cpus(), receive, self._receive_death)

    def start(self, prefix: str, row: Row, seed: int) -> tuple[str, AgentWorker]:
        """Start an episode; return a name of its own with this prefix, and its worker. Raises EngineError."""
        name, token = f"{prefix}-{token_hex(6)}", token_hex(32)
        worker = self._pool.next_worker(lambda: ModelService(self._endpoint.url, token_hex(32), self._model))
        self._endpoint.send([OpenEpisode(name, token, worker.key)])
        worker.start(StartEpisode(name, token, row, seed))
        return name, worker

    def stop(self, name: str, worker: AgentWorker) -> None:
        """Close an episode: the endpoint refuses its calls, and its worker cancels it unless it has ended."""
        self._endpoint.send([CloseEpisode(name)])
        if name in worker.episodes:
            worker.stop(name)

    def answer(self, answers: Sequence[Reply | Refusal]) -> None:
        """Answer calls."""
        if answers:
            self._endpoint.send(answers)

    def note_ends(self, ended: Sequence[EpisodeEnded]) -> None:
        """Take note of what workers say about their episodes."""
        for message in ended:
            self._pool.forget(message.episode)

    def check(self) -> None:
        """Kill workers that do not stop an episode."""
        self._pool.check()

    def replace_endpoint(self) -> None:
        """Start another endpoint, and other workers for those that call the dead one. Raises EngineError."""
        self._endpoint = self._start_endpoint()
        self._pool.restart()

    def _start_endpoint(self) -> Endpoint:
        self.num_endpoints += 1
        if self.num_endpoints > _MAX_ENDPOINTS:
            raise EngineError(f"agents: the endpoint has died {_MAX_ENDPOINTS} times.")
        number, receive = self.num_endpoints, self._receive
        return Endpoint(self._model, receive, lambda reason: receive([EndpointDied(number)]))

    def _receive_death(self, worker: AgentWorker, end: str) -> None:
        self._receive([WorkerDied(worker, end)])
