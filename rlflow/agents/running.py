"""The episode that a worker process runs at this moment, which others can read after the process has died.

Many episodes share a process, and one of them may end it, block it, or crash it. So the process notes in a file, which
it has mapped into its memory, whose code it enters, and that it has left it again.
"""

import asyncio
import os
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from mmap import mmap
from pathlib import Path
from typing import Any

_SIZE = 256

EPISODE: ContextVar[str] = ContextVar("EPISODE", default="")
"""The episode to which the tasks that are created belong."""


class RunningEpisode:
    """The note of this process."""

    def __init__(self, folder: str) -> None:
        path = _path(folder, os.getpid())
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._note = mmap(file.fileno(), _SIZE)

    def mark_as_blocking(self) -> None:
        """Note that the episode blocks the process: others call it before they end the process."""
        self._note[-1] = 1

    def create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        """Create a task whose episode is noted while it runs: the task factory of a loop."""
        if name := EPISODE.get():
            coroutine = _Noted(coroutine, self._note, name.encode().ljust(_SIZE, b"\0"))
        return asyncio.Task(coroutine, loop=loop, **options)


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine that notes when it runs."""

    def __init__(self, coroutine: Any, note: mmap, name: bytes) -> None:
        self._coroutine, self._note, self._name = coroutine, note, name

    def send(self, value: Any) -> Any:
        self._note[:] = self._name
        try:
            return self._coroutine.send(value)
        finally:
            self._note[0] = 0

    def throw(self, *error: Any) -> Any:
        self._note[:] = self._name
        try:
            return self._coroutine.throw(*error)
        finally:
            self._note[0] = 0

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())


def take_note(folder: str, pid: int) -> tuple[str, bool]:
    """Return the episode that a process was running when it died, and whether that blocked it; delete the note.

    The name is empty if it was running none.
    """
    path = _path(folder, pid)
    try:
        content = path.read_bytes()
        path.unlink()
    except OSError:  # it died before it ran any
        return "", False
    return content.partition(b"\0")[0].decode(), bool(content[-1])


def _path(folder: str, pid: int) -> Path:
    return Path(folder, f"running-{pid}")
