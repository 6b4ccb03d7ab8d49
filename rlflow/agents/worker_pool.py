"""The worker processes of an engine's agents, as the engine sees them."""

import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlflow.agents.base import ModelService
from rlflow.agents.messages import EpisodeEnded, StartEpisode, StopEpisode, pack, read_messages
from rlflow.agents.worker import AgentSpec
from rlflow.errors import EngineError
from rlflow.rewards.workers import ForkServer

# The time in which a worker takes a message, and ends an episode that is stopped. One that takes longer hangs.
_PATIENCE_S = 10.0
# How often a worker is started in the place of one that did not get ready.
_MAX_STARTS = 3


class AgentWorker:
    """A worker process, whose messages a thread of this process reads."""

    def __init__(self, fork_server: ForkServer, service: ModelService, receive: "Receive", died: "Died") -> None:
        """Fork it. Raises EngineError."""
        self.key = service.key
        self.episodes: set[str] = set()
        """The episodes that it runs."""
        self.has_died = False
        self._stopping: dict[str, float] = {}
        """Episodes that it has to stop, and by when."""
        self._fork_server, self._process = fork_server, fork_server.start_worker()
        seconds = struct.pack("@ll", int(_PATIENCE_S), 0)
        self._process.socket.settimeout(None)
        self._process.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._answers = self._process.socket.makefile("rb")
        self._send(service)
        threading.Thread(target=self._read, args=(receive, died), name="agent worker", daemon=True).start()

    def start(self, message: StartEpisode) -> None:
        """Run an episode."""
        self.episodes.add(message.episode)
        self._send(message)

    def stop(self, episode: str) -> None:
        """Cancel an episode. Its end is received as that of others."""
        self._stopping.setdefault(episode, time.monotonic() + _PATIENCE_S)
        self._send(StopEpisode(episode))

    def forget(self, episode: str) -> None:
        """Take note of an episode's end."""
        self.episodes.discard(episode)
        self._stopping.pop(episode, None)

    def check(self, now: float) -> None:
        """Kill the process if it does not stop what it has to."""
        if any(deadline < now for deadline in self._stopping.values()):
            self.kill()

    def kill(self) -> None:
        """End the process with all that it started."""
        if not self.has_died:  # else another process may have its number by now
            self.has_died = True
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _send(self, message: Any) -> None:
        try:
            self._process.socket.sendall(pack([message]))
        except OSError:  # it has died, or it hangs
            self.kill()

    def _read(self, receive: "Receive", died: "Died") -> None:
        with self._answers, suppress(EOFError):
            while True:
                receive(read_messages(self._answers))
        self.has_died = True
        end = "the fork server has ended"
        with suppress(EngineError):
            end = self._fork_server.end_worker(self._process)
        died(self, end)


Receive = Callable[[list[EpisodeEnded]], None]
Died = Callable[[AgentWorker, str], None]


class WorkerPool:
    """The workers of one engine. They start on first use, and one that has died is replaced on the next.

    They end on ``stop`` or with this object.
    """

    def __init__(self, spec: AgentSpec, num_workers: int, receive: Receive, died: Died) -> None:
        """Load the agent in a fork server. Raises RecipeError and EngineError.

        Threads of this pool call ``receive`` with what workers send, and ``died`` with one that has died and how.
        """
        spec.load(spec.environment)
        self._fork_server = ForkServer({spec.environment: spec})
        # Threads that read from workers hold the fork server.
        self.stop = weakref.finalize(self, self._fork_server.stop)
        self._receive, self._died = receive, died
        self._workers: list[AgentWorker | None] = [None] * num_workers

    def next_worker(self, service: Callable[[], ModelService]) -> AgentWorker:
        """Return the worker with the fewest episodes. Raises EngineError.

        ``service`` returns a service with a new key, for a worker that starts.
        """
        loads = [len(worker.episodes) if worker and not worker.has_died else 0 for worker in self._workers]
        number = loads.index(min(loads))
        worker = self._workers[number]
        if worker is None or worker.has_died:
            worker = self._workers[number] = self._start_worker(service)
        return worker

    def _start_worker(self, service: Callable[[], ModelService]) -> AgentWorker:
        for _ in range(_MAX_STARTS - 1):
            with suppress(EngineError):  # it was not ready in time, or was killed before
                return AgentWorker(self._fork_server, service(), self._receive, self._died)
        return AgentWorker(self._fork_server, service(), self._receive, self._died)

    def forget(self, episode: str) -> None:
        """Take note of an episode's end."""
        for worker in filter(None, self._workers):
            worker.forget(episode)

    def check(self) -> None:
        """Kill workers that hang."""
        now = time.monotonic()
        for worker in filter(None, self._workers):
            worker.check(now)

    def restart(self) -> None:
        """Kill all workers: the endpoint that they call is gone."""
        for worker in filter(None, self._workers):
            worker.kill()
        self._workers = [None] * len(self._workers)
