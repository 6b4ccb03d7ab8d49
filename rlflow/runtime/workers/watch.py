"""Engines that hang: the process is there and answers nothing, which neither Ray nor the library tells."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

# Without a step for so long an engine that has work hangs. vLLM allows 300 s for a step of its own ranks, and what
# takes long (loading, compiling, recording of graphs) is done before the first one.
SILENT_S = 600.0
# How often an engine is asked that has been at work for so long.
LOOK_S = 10.0


@dataclass
class _Sign:
    """Of life."""

    at: float
    """When it was seen, by time.monotonic()."""
    steps: int | None = None
    asked: "Future[int] | None" = None


class Watch:
    """Over the engines of a role, while they are at work. Its methods may be called from several threads."""

    def __init__(self, steps: "Callable[[int], Future[int]]", end: Callable[[int, str], None]) -> None:
        """``steps`` asks the engine of a rank how many steps it has done so far, ``end`` ends it and says why."""
        self._steps, self._end = steps, end
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], int] = {}
        self._signs: dict[int, _Sign] = {}
        self._looking = False

    def over(self, rank: int, call: "Future[Any]") -> "Future[Any]":
        """Until ``call`` is done the engine does steps, or is ended."""
        with self._lock:
            if rank not in self._calls.values():
                self._signs[rank] = _Sign(time.monotonic())
            self._calls[call] = rank
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="watch", daemon=True).start()
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: "Future[Any]") -> None:
        with self._lock:
            del self._calls[call]

    def _look(self) -> None:
        while True:
            with self._lock:
                calls = dict(self._calls)
                if not calls:
                    self._looking = False
                    return
            for rank in {calls[call] for call in wait(calls, timeout=LOOK_S).not_done}:
                self._look_at(rank, self._signs[rank])

    def _look_at(self, rank: int, sign: _Sign) -> None:
        now = time.monotonic()
        if sign.asked is not None and sign.asked.done():
            if not sign.asked.exception() and sign.asked.result() != sign.steps:
                sign.at, sign.steps = now, sign.asked.result()
            sign.asked = None
        if now - sign.at > SILENT_S:
            self._end(rank, f"has written nothing for {SILENT_S:g} s")
        elif sign.asked is None:
            sign.asked = self._steps(rank)
