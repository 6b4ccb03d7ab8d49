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

    def __init__(self, steps: "Callable[[Any], Future[int]]", end: Callable[[Any, str], None]) -> None:
        """``steps`` asks an engine how many steps it has done so far, ``end`` ends one and says why."""
        self._steps, self._end = steps, end
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], Any] = {}
        self._signs: dict[Any, _Sign] = {}
        self._looking = False

    def over(self, engine: Any, call: "Future[Any]") -> "Future[Any]":
        """Until ``call`` is done the engine does steps, or is ended."""
        with self._lock:
            if engine not in self._calls.values():
                self._signs[engine] = _Sign(time.monotonic())
            self._calls[call] = engine
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
            for engine in {calls[call] for call in wait(calls, timeout=LOOK_S).not_done}:
                self._look_at(engine, self._signs[engine])

    def _look_at(self, engine: Any, sign: _Sign) -> None:
        now = time.monotonic()
        if sign.asked is not None and sign.asked.done():
            if not sign.asked.exception() and sign.asked.result() != sign.steps:
                sign.at, sign.steps = now, sign.asked.result()
            sign.asked = None
        if now - sign.at > SILENT_S:
            self._end(engine, f"has written nothing for {SILENT_S:g} s")
        elif sign.asked is None:
            sign.asked = self._steps(engine)
