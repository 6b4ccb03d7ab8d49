"""Calls, and a worker as it is called."""

import pickle
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlflow.rewards.pool.channel import Channel

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
