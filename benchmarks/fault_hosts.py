"""The processes of runs with faults: simulated hosts that several runs share, and what a run leaves behind."""

import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from select import select
from time import monotonic, sleep
from unittest.mock import patch

from rlflow.recipe.compose import load_cluster
from rlflow.runtime.ray.cluster import connection
from rlflow.system.processes import descendants, die_with_parent, kill
from tests.ray_workers import forked_workers

HOSTS = "2x2@cpu"
# No process may stay longer after its run. Ray's agents look for their control service for a minute.
_LEFTOVER_S = 75.0
_STARTS = 3


class Hosts:
    """Simulated hosts in a process of their own, which runs use one after another."""

    def __init__(self) -> None:
        """Start the hosts. They end with this process.

        On a machine with other work, Ray may give up before its own processes have started, so this tries again.
        """
        line = next(filter(None, (self._start() for _ in range(_STARTS))), "")
        if not line:
            raise RuntimeError(f"the simulated hosts did not start in {_STARTS} attempts")
        answer: Mapping[str, str] = json.loads(line)
        self.address, self._token = answer["address"], answer["token"]

    def _start(self) -> str:
        """Start the process of the hosts, and return what it says; nothing if it has failed."""
        reader, writer = os.pipe()
        self._parent, self.pid = os.getpid(), 0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._serve(writer)
            except BaseException:
                traceback.print_exc()
            finally:  # A child that fails must not continue the work of its parent.
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            line = pipe.readline()
        if not line:
            self.stop()
        return line

    def _serve(self, pipe: int) -> None:
        die_with_parent(self._parent)
        # Workers that import their libraries take most of the time of a run.
        with forked_workers(), connection.simulated(load_cluster(HOSTS)) as processes:
            answer = {"address": processes.address, "token": os.environ["RAY_AUTH_TOKEN"]}
            os.write(pipe, f"{json.dumps(answer)}\n".encode())
            select([], [], [])

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the hosts from the process of a run."""
        same_token = patch("secrets.token_hex", lambda size: self._token)
        with same_token, connection.private_ray(), connection.joined(self.address):
            yield

    def stop(self) -> None:
        """Kill all processes of the hosts."""
        for pid in (*descendants(self.pid), self.pid):
            kill(pid)
        os.waitpid(self.pid, 0)


_RUNNING: list[Hosts] = []
"""The hosts of this process that runs share."""


def shared_hosts() -> Hosts:
    """Return hosts that all runs of this process use."""
    if not _RUNNING:
        _RUNNING.append(Hosts())
    return _RUNNING[0]


def stop_shared_hosts() -> None:
    """Stop the shared hosts, so that forked processes start their own."""
    while _RUNNING:
        _RUNNING.pop().stop()


def wait_for_end(known: set[int]) -> tuple[list[str], float]:
    """Wait until all child processes that are not ``known`` have ended, and kill those that stay.

    Returns the descriptions of killed processes, and the seconds of waiting.
    """
    start = monotonic()
    while True:
        new = [pid for pid in descendants(os.getpid()) if pid not in known]
        alive = {pid: command for pid in new if (command := _alive(pid)) is not None}
        seconds = monotonic() - start
        if not alive:
            return [], seconds
        if seconds > _LEFTOVER_S:
            for pid in alive:
                kill(pid)
            return [f"{pid} {command[:80].strip()}" for pid, command in alive.items()], seconds
        sleep(0.2)


def _alive(pid: int) -> str | None:
    """Return the command line of a process; None for one that has ended, which is then reaped if it is a child."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return None
    except ChildProcessError:
        pass
    try:
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
        return None if is_zombie else Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return None
