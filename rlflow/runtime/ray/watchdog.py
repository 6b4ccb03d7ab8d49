"""A watchdog for engines that hang: the process runs but answers nothing, which neither Ray nor the library reports."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

# An engine that has work and makes no step for so long hangs. vLLM allows 300 s for a step of its own ranks, and all
# that takes long (loading, compiling, recording CUDA graphs) happens before the first step.
SILENT_S = 600.0
# Seconds between two checks of an engine at work.
LOOK_S = 10.0


@dataclass
class _Progress:
    """The last progress that was seen of an engine."""

    at: float
    """Its time, by time.monotonic()."""
    steps: int | None = None
    pending: "Future[int] | None" = None
    """The request for the current number of steps."""


class Watchdog:
    """A check, in a thread of its own, that engines at work make steps. Methods may be called from several threads."""

    def __init__(self, steps: "Callable[[Any], Future[int]]", end: Callable[[Any, str], None]) -> None:
        """Take two functions: ``steps`` requests an engine's number of steps, ``end`` ends an engine for a reason."""
        self._steps, self._end = steps, end
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], Any] = {}
        self._progress: dict[Any, _Progress] = {}
        self._is_running = False

    def watch(self, engine: Any, call: "Future[Any]") -> "Future[Any]":
        """End the engine if it stops making steps before ``call`` is done. Returns ``call``."""
        with self._lock:
            if engine not in self._calls.values():
                self._progress[engine] = _Progress(time.monotonic())
            self._calls[call] = engine
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: "Future[Any]") -> None:
        with self._lock:
            del self._calls[call]

    def _run(self) -> None:
        while True:
            with self._lock:
                calls = dict(self._calls)
                if not calls:
                    self._is_running = False
                    return
            for engine in {calls[call] for call in wait(calls, timeout=LOOK_S).not_done}:
                self._check(engine, self._progress[engine])

    def _check(self, engine: Any, progress: _Progress) -> None:
        now = time.monotonic()
        if progress.pending is not None and progress.pending.done():
            if not progress.pending.exception() and progress.pending.result() != progress.steps:
                progress.at, progress.steps = now, progress.pending.result()
            progress.pending = None
        if now - progress.at > SILENT_S:
            self._end(engine, f"has made no step for {SILENT_S:g} s")
        elif progress.pending is None:
            progress.pending = self._steps(engine)
