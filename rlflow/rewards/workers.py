"""The fork server and the workers that it forks, as their pool sees them."""

import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlflow.errors import EngineError
from rlflow.rewards.base import CallableSpec
from rlflow.rewards.calls import Call
from rlflow.rewards.fork_server import NUMBER
from rlflow.rewards.processes import Channel

# Well below the buffer of a socket, so that sending to a worker whose function hangs does not block.
_MAX_UNREAD_BYTES = 1 << 15
# A socket's buffer holds a few hundred messages, however small they are.
_MAX_UNREAD_CALLS = 64
# The server may import libraries as large as torch before it starts; to fork, start and kill a worker is quick.
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S = 300.0, 30.0


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
        self.stop = weakref.finalize(self, _stop_server, self._socket, process)
        self._socket.settimeout(_START_TIMEOUT_S)
        channel = Channel(self._socket)
        try:
            channel.send(pickle.dumps((sys.path, dict(specs))))
            answers = channel.receive()
        except OSError:
            answers = None
        if not answers:
            raise EngineError("the fork server of reward functions did not start.")
        if answers[0] is not None:
            raise answers[0]
        self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a worker; return its process id and our end of its socket. Raises EngineError."""
        our_end, worker_end = socket.socketpair()
        with worker_end:
            try:
                return self._request(0, [worker_end.fileno()]), our_end
            except BaseException:
                our_end.close()
                raise

    def end(self, pid: int) -> int:
        """Kill a worker with all that it started; return its exit code, or minus the number of its signal."""
        return self._request(pid, [])

    def _request(self, number: int, descriptors: list[int]) -> int:
        answer = b""
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


def _stop_server(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ANSWER_TIMEOUT_S)
        return
    process.kill()
    process.wait()


class ForkedWorker:
    """A worker process with its queue of calls. When it is ready it processes the first call of the queue."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.socket = end
        self.pending: deque[Call] = deque()
        """Calls that were sent and are not answered yet."""
        self._channel = Channel(end)
        self._sizes: deque[int] = deque()
        self._limits: deque[float] = deque()
        self.is_ready = False
        """True once the process has started and takes calls."""
        self._started = time.monotonic()
        """The start of the current call, or of the process until it is ready, on the monotonic clock."""

    @property
    def deadline(self) -> float:
        """Return when the current call must end, or the process be ready, on the monotonic clock."""
        return self._started + (self._limits[0] if self.is_ready else _ANSWER_TIMEOUT_S)

    def submit(self, call: Call, limit_s: float) -> bool:
        """Send a call if the queue has room, and return whether it had. Raises OSError when the worker has died."""
        now = time.monotonic()
        if self.pending and (len(self.pending) > _MAX_UNREAD_CALLS or self.deadline <= now):
            return False
        message = pickle.dumps((call.name, call.texts, call.rows))
        if self.pending and sum(self._sizes) - self._sizes[0] + len(message) > _MAX_UNREAD_BYTES:
            return False
        if not self.pending:
            self._started = now
        self.socket.settimeout(limit_s)
        with suppress(TimeoutError):  # the call has then missed its deadline, which makes it fail
            self._channel.send(message)
        self.pending.append(call)
        self._sizes.append(len(message))
        self._limits.append(limit_s)
        return True

    def receive(self) -> list[Any] | None:
        """Return the answers that have arrived; None when the worker has died. The first message makes it ready."""
        messages = self._channel.receive()
        if messages and not self.is_ready:
            self.is_ready = True
            return messages[1:]
        return messages

    def pop_answered(self) -> tuple[Call, float]:
        """Remove the call that was just answered from the queue; return it and the seconds that it took."""
        now = time.monotonic()
        seconds, self._started = now - self._started, now
        self._sizes.popleft()
        self._limits.popleft()
        return self.pending.popleft(), seconds
