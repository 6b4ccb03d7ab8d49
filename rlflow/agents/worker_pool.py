"""The worker processes of an engine's agents, as the engine sees them."""

import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlflow.agents.base import ModelService
from rlflow.agents.messages import LENGTH, EpisodeEnded, StartEpisode, StopEpisode, pack
from rlflow.agents.worker import AgentSpec
from rlflow.rewards.workers import ForkedWorker, ForkServer

# The time in which a worker takes a message, and ends an episode that is stopped. One that takes longer hangs.
_PATIENCE_S = 10.0

Receive = Callable[[list[EpisodeEnded]], None]
Died = Callable[[tuple[str, ...], str], None]


class WorkerPool:
    """The workers of one engine, one after another on first use. One thread calls the methods."""

    def __init__(self, spec: AgentSpec, num_workers: int, receive: Receive, died: Died) -> None:
        """Load the agent in a fork server. Raises RecipeError and EngineError.

        Threads of this pool call ``receive`` with what workers send, and ``died`` with the episodes of one that has
        died, and how it ended.
        """
        spec.load(spec.environment)
        self._fork_server = ForkServer({spec.environment: spec})
        self._receive, self._died = receive, died
        self._workers: list[_Worker | None] = [None] * num_workers
        self._by_episode: dict[str, _Worker] = {}

    def start(self, episode: StartEpisode, service: Callable[[], ModelService]) -> str:
        """Run an episode in the worker with the fewest; return the key of the worker's service. Raises EngineError.

        ``service`` returns a service with a new key, for a worker that starts.
        """
        number = min(range(len(self._workers)), key=lambda place: len(worker.live) if (worker := self._workers[place]) else 0)
        worker = self._workers[number]
        if worker is None or worker.has_died:
            worker = self._workers[number] = _Worker(self._fork_server, service(), self._receive, self._died)
        worker.live.add(episode.episode)
        self._by_episode[episode.episode] = worker
        worker.send(episode)
        return worker.key
