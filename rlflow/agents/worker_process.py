"""A worker process of agents, as its engine sees it."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlflow.agents.base import ModelService
from rlflow.agents.messages import StartEpisode, StopEpisode, pack, read_messages
from rlflow.agents.running import take_note
from rlflow.errors import EngineError
from rlflow.rewards.workers import ForkServer

# The time in which a worker takes a message, and ends an episode that is stopped. One that takes longer hangs.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class WorkerDied:
    """A worker process has ended."""

    worker: "AgentWorker"
    end: str
    """The way in which it ended."""
    running: str
    """The episode whose code it was running; empty if it was running none."""
    is_blocked: bool
    """The running episode kept the process from all others for too long."""


class AgentWorker:
    """A worker process, whose messages a thread of this process reads."""

    def __init__(
        self, fork_server: ForkServer, service: ModelService, receive: Callable[[Sequence[Any]], None]
    ) -> None:
        """Fork it. Raises EngineError. A thread calls ``receive`` with messages, and with the process's death."""
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
        threading.Thread(
            target=self._read, args=(receive, service.model.tokenizer), name="agent worker", daemon=True
        ).start()

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

    def _read(self, receive: Callable[[Sequence[Any]], None], folder: str) -> None:
        with self._answers, suppress(EOFError):
            while True:
                receive(read_messages(self._answers))
        self.has_died = True
        end = "the fork server has ended"
        with suppress(EngineError):
            end = self._fork_server.end_worker(self._process)
        receive([WorkerDied(self, end, *take_note(folder, self._process.pid))])
