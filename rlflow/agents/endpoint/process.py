"""The endpoint process, as its engine's process sees it."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import IO

from rlflow.agents.base import ModelSpec
from rlflow.agents.messages import (
    Call,
    CancelCall,
    CloseEpisode,
    Count,
    OpenEpisode,
    Ping,
    Refusal,
    Reply,
    pack,
    read_messages,
)
from rlflow.errors import EngineError

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 120.0, 5.0
# Checks without an answer after which the process hangs. A chat template may keep it busy for some seconds.
_MAX_SILENT_CHECKS = 15
# The endpoint reads a folder, and encodes one text at a time.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

FromEndpoint = Call | CancelCall | Count
ToEndpoint = OpenEpisode | CloseEpisode | Ping | Reply | Refusal


class Endpoint:
    """The endpoint process of an engine. It ends on ``stop``, with this object, or with this process."""

    def __init__(
        self, model: ModelSpec, receive: Callable[[Sequence[FromEndpoint]], None], died: Callable[[str], None]
    ) -> None:
        """Start the process and wait until it serves. Raises EngineError.

        A thread calls ``receive`` with messages, and ``died`` with the reason if the process ends by itself.
        """
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115, closed when the process has ended
        command = [sys.executable, "-m", "rlflow.agents.endpoint", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **_VARIABLES},
            )
        unsent: SimpleQueue[bytes | None] = SimpleQueue()
        is_stopping, has_answered = threading.Event(), threading.Event()
        self.pid = process.pid
        self._socket, self._process, self._unsent, self._has_answered = ours, process, unsent, has_answered
        self._num_silent_checks = 0
        self.stop = weakref.finalize(self, _stop, ours, process, unsent, is_stopping)
        frames = ours.makefile("rb")
        answer: int | str = "it does not answer"
        ours.settimeout(_START_TIMEOUT_S)
        with suppress(OSError, EOFError):
            ours.sendall(pack([model]))
            answer = read_messages(frames)[0]
        ours.settimeout(None)
        if isinstance(answer, str):
            self.stop()
            with errors, frames:
                raise EngineError(f"the endpoint of agents did not start: {_last_line(errors) or answer}.")
        self.url = f"http://127.0.0.1:{answer}"

        # The threads do not refer to this object, so that it can end.
        def forward() -> None:
            with errors, frames:
                with suppress(OSError, EOFError):
                    while True:
                        messages = read_messages(frames)
                        has_answered.set()
                        receive([message for message in messages if not isinstance(message, Ping)])
                if not is_stopping.is_set():
                    died(_last_line(errors) or f"exit code {process.wait()}")

        def write() -> None:
            with suppress(OSError):
                while (frame := unsent.get()) is not None:
                    ours.sendall(frame)

        threading.Thread(target=forward, name="endpoint reader", daemon=True).start()
        threading.Thread(target=write, name="endpoint writer", daemon=True).start()

    def send(self, messages: Sequence[ToEndpoint]) -> None:
        """Send messages. Any thread may do so, and none waits."""
        self._unsent.put(pack(messages))

    @property
    def has_died(self) -> bool:
        """Return whether the process has ended, from the moment that its connections are closed."""
        if self._socket.fileno() < 0:
            return True
        ends = select.poll()
        ends.register(self._socket, select.POLLRDHUP)
        return bool(ends.poll(0))

    def check(self) -> bool:
        """Return whether the process has answered lately, and kill it if it hangs."""
        self._num_silent_checks = 0 if self._has_answered.is_set() else self._num_silent_checks + 1
        if self._num_silent_checks > _MAX_SILENT_CHECKS:
            self._process.kill()
        self._has_answered.clear()
        self.send([Ping()])
        return self._num_silent_checks < 2


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line that the process has written."""
    errors.seek(0)
    lines = errors.read()[-10_000:].decode(errors="replace").split("\n")
    return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "")


def _stop(
    ours: socket.socket,
    process: "subprocess.Popen[bytes]",
    unsent: "SimpleQueue[bytes | None]",
    is_stopping: threading.Event,
) -> None:
    is_stopping.set()
    unsent.put(None)
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    ours.close()
