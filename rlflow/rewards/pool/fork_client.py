"""Calls, and a worker as it is called.

A nursery as its owner has it.
"""

import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlflow.errors import EngineError
from rlflow.rewards.base import Findable
from rlflow.rewards.pool.fork_server import NUMBER
from rlflow.rewards.processes import Channel

# Well below what a socket holds: who sends to a worker is not held up by a function that hangs.
_UNREAD_BYTES = 1 << 15
# It holds a few hundred messages, however small they are.
_UNREAD_CALLS = 64


@dataclass(frozen=True)
class Call:
    """Some responses for one part of a reward."""

    part: str
    places: Sequence[int]
    """Of the responses among all: for whoever asked."""
    texts: Sequence[str]
    rows: Sequence[Any]
    """Of the data set; or what an environment is given besides the texts."""

    def singly(self) -> "list[Call]":
        every = zip(self.places, self.texts, self.rows, strict=True)
        return [Call(self.part, [place], [text], [row]) for place, text, row in every]


class Worker:
    """What it has been given and not answered yet, the one that it is at first."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.socket = end
        self.begun: deque[Call] = deque()
        self._channel = Channel(end)
        self._sizes: deque[int] = deque()
        self._limits: deque[float] = deque()
        self._since = 0.0

    @property
    def deadline(self) -> float:
        """Of the call that it is at, on the monotonic clock."""
        return self._since + self._limits[0]

    def give(self, call: Call, limit_s: float) -> bool:
        """Whether there was room for the call. Raises OSError when the worker has gone."""
        now = time.monotonic()
        if self.begun and (len(self.begun) > _UNREAD_CALLS or self.deadline <= now):
            return False
        message = pickle.dumps((call.part, call.texts, call.rows))
        if self.begun and sum(self._sizes) - self._sizes[0] + len(message) > _UNREAD_BYTES:
            return False
        if not self.begun:
            self._since = now
        self.socket.settimeout(limit_s)
        with suppress(TimeoutError):  # the call is over its deadline then, and fails by that
            self._channel.send(message)
        self.begun.append(call)
        self._sizes.append(len(message))
        self._limits.append(limit_s)
        return True

    def messages(self) -> list[Any] | None:
        """Answers that have come; None when the worker has gone."""
        return self._channel.messages()

    def answered(self) -> tuple[Call, float]:
        """The call that an answer is to, and the seconds that it took."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._sizes.popleft()
        self._limits.popleft()
        return self.begun.popleft(), seconds


# Imports may be of libraries as large as torch; forking and killing are not.
_START_S, _ANSWER_S = 300.0, 30.0


class Nursery:
    """It and its workers end by ``stop``, with this object, and with this process."""

    def __init__(self, parts: Mapping[str, Findable]) -> None:
        """Raises EngineError when the functions cannot be had there."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rlflow.rewards.pool.fork_server", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.pid = process.pid
        self.stop = weakref.finalize(self, _stop, self._socket, process)
        self._socket.settimeout(_START_S)
        channel = Channel(self._socket)
        try:
            channel.send(pickle.dumps((sys.path, dict(parts))))
            answers = channel.messages()
        except OSError:
            answers = None
        if not answers:
            raise EngineError("the process that rewards are forked from did not start.")
        if answers[0] is not None:
            raise answers[0]
        self._socket.settimeout(_ANSWER_S)

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its process id, and our end of its socket. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._asked(0, [theirs.fileno()]), ours
            except BaseException:
                ours.close()
                raise

    def end(self, pid: int) -> int:
        """Kills a worker and everything that it has started. Its exit code, or the signal's number below zero."""
        return self._asked(pid, [])

    def _asked(self, number: int, ends: list[int]) -> int:
        answer = b""
        try:
            with suppress(OSError):
                socket.send_fds(self._socket, [NUMBER.pack(number)], ends)
                answer = self._socket.recv(NUMBER.size, socket.MSG_WAITALL)
        finally:
            if len(answer) < NUMBER.size:
                # An answer that comes late would be taken for that to the next question.
                self._socket.close()
        if len(answer) < NUMBER.size:
            raise EngineError("the process that rewards are forked from has died.")
        return int(NUMBER.unpack(answer)[0])


def _stop(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ANSWER_S)
        return
    process.kill()
    process.wait()
