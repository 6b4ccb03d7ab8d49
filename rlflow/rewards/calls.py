"""Calls of the functions in a process pool, and a queue to which other threads add calls."""

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any


@dataclass(frozen=True)
class Call:
    """Some responses for one callable of a pool."""

    name: str
    """The callable's name in the pool."""
    indices: Sequence[int]
    """The positions of the responses in the caller's batch."""
    texts: Sequence[str]
    rows: Sequence[Any]
    """One argument for each text: a row of the data set, or an environment's row and state."""

    def split(self) -> "list[Call]":
        """Return a call for each response."""
        entries = zip(self.indices, self.texts, self.rows, strict=True)
        return [Call(self.name, [index], [text], [row]) for index, text, row in entries]


class CallQueue:
    """Calls that arrive while a pool works. A selector finds the queue ready when there are new ones."""

    def __init__(self) -> None:
        self.is_open = True
        """False once no more calls will arrive."""
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A thread may still read when this process ends.
        weakref.finalize(self, os.close, self._counter).atexit = False

    def put(self, call: Call) -> None:
        """Add a call, from any thread."""
        self._calls.put(call)
        os.eventfd_write(self._counter, 1)

    def take(self) -> list[Call]:
        """Remove and return the calls that have arrived."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._counter)
        calls = []
        with suppress(Empty):
            while True:
                calls.append(self._calls.get_nowait())
        return calls

    def close(self) -> None:
        """Accept no more calls."""
        self.is_open = False
        os.eventfd_write(self._counter, 1)

    def fileno(self) -> int:
        """Return the descriptor that a selector waits for."""
        return self._counter
