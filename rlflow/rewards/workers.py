"""The fork server and the workers that it forks, as their pool sees them."""

import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlflow.errors import EngineError
from rlflow.rewards.base import CallableSpec
from rlflow.rewards.fork_server import NUMBER

# The server may import libraries as large as torch before it starts; to fork, start and kill a worker is quick.
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S = 300.0, 30.0
# A timeout of 0 would make a socket non-blocking.
_LEAST_TIMEOUT_S = 1e-6


class ForkedWorker:
    """A worker process, which processes one call at a time. What it answers is trusted, as rlflow's own.

    One that serves its ``socket`` in its own way gets no calls.
    """

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.socket = end
        self._answers = end.makefile("rb")

    def wait_until_ready(self) -> None:
        """Wait for the process to start. Raises TimeoutError, and EOFError if it has died."""
        self._receive(_ANSWER_TIMEOUT_S)

    def call(self, message: bytes, limit_s: float) -> Any:
        """Send a pickled call and return the answer.

        Raises TimeoutError after ``limit_s``, EOFError if the process dies, and OSError if it had died before.
        """
        deadline = time.monotonic() + limit_s
        self.socket.settimeout(limit_s)
        self.socket.sendall(message)
        return self._receive(deadline - time.monotonic())

    def close(self) -> None:
        """Close this end of the process's socket."""
        self._answers.close()
        self.socket.close()

    def _receive(self, limit_s: float) -> Any:
        self.socket.settimeout(max(_LEAST_TIMEOUT_S, limit_s))
        try:
            return pickle.load(self._answers)
        except (ConnectionResetError, pickle.UnpicklingError) as error:  # it died before it read, or while it answered
            raise EOFError from error


class ForkServer:
    """The fork server process. It ends with its workers on ``stop``, with this object, or with this process."""

    def __init__(self, specs: Mapping[str, CallableSpec]) -> None:
        """Start the server and wait until it has loaded the callables. Raises EngineError."""
        self._socket, server_socket = socket.socketpair()
        command = [sys.executable, "-m", "rlflow.rewards.fork_server", str(server_socket.fileno())]
        with server_socket:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[server_socket.fileno()], start_new_session=True
            )
        self.pid = process.pid
        self.workers: list[ForkedWorker] = []
        self.stop = weakref.finalize(self, _stop_server, self._socket, process, self.workers)
        self._lock = threading.Lock()
        """Held for one request at a time."""
        self._socket.settimeout(_START_TIMEOUT_S)
        error: Exception | None = EngineError("the fork server of reward functions did not start.")
        with suppress(OSError, EOFError), self._socket.makefile("rb") as answers:
            self._socket.sendall(pickle.dumps((sys.path, dict(specs))))
            error = pickle.load(answers)
        if error is not None:
            raise error
        self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def start_worker(self) -> ForkedWorker:
        """Fork a worker and wait until it is ready. Raises EngineError."""
        our_end, worker_end = socket.socketpair()
        with worker_end:
            try:
                worker = ForkedWorker(self._request(0, [worker_end.fileno()]), our_end)
            except BaseException:
                our_end.close()
                raise
        self.workers.append(worker)
        try:
            worker.wait_until_ready()
        except (TimeoutError, EOFError) as error:
            end = self.end_worker(worker)
            fact = "it was not ready in time" if isinstance(error, TimeoutError) else f"it ended ({end})"
            raise EngineError(f"a worker process of reward functions did not start: {fact}.") from None
        return worker

    def end_worker(self, worker: ForkedWorker) -> str:
        """Kill a worker with all that it started; return its exit code or the signal that ended it, as text."""
        self.workers.remove(worker)
        worker.close()
        return _describe_exit(self._request(worker.pid, []))

    def _request(self, number: int, descriptors: list[int]) -> int:
        answer = b""
        with self._lock:
            try:
                with suppress(OSError):
                    socket.send_fds(self._socket, [NUMBER.pack(number)], descriptors)
                    answer = self._socket.recv(NUMBER.size, socket.MSG_WAITALL)
            finally:
                if len(answer) < NUMBER.size:
                    # A late answer would be read as the answer to the next request.
                    self._socket.close()
        if len(answer) < NUMBER.size:
            raise EngineError("the fork server of reward functions has died.")
        return int(NUMBER.unpack(answer)[0])


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    names = {known.value: known.name for known in signal.Signals}
    return names.get(-exit_code, f"signal {-exit_code}")


def _stop_server(control: socket.socket, process: "subprocess.Popen[bytes]", workers: list[ForkedWorker]) -> None:
    # Another thread may be waiting for an answer.
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    control.close()
    for worker in list(workers):
        worker.close()
