"""Engines that are at work and do no steps are ended."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rlflow.runtime.ray.watchdog import Watchdog

_LONG = 60


class Engines:
    """Of which rank 1 does a step whenever it is asked, and rank 0 none; calls are done when ``ended`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], "Future[int]"] | None = None) -> None:
        monkeypatch.setattr("rlflow.runtime.ray.watchdog.LOOK_S", 0.01)
        monkeypatch.setattr("rlflow.runtime.ray.watchdog.SILENT_S", 0.3)
        self.asked = [0, 0]
        self.ended: Future[tuple[int, str]] = Future()
        self.worked: Future[None] = Future()
        self._answer = answer
        self.watch = Watchdog(self._steps, self._end)

    def _steps(self, rank: int) -> "Future[int]":
        self.asked[rank] += 1
        if self.asked[rank] == 2 * _LONG:
            self.worked.set_result(None)
        if self._answer is not None:
            return self._answer()
        told: Future[int] = Future()
        told.set_result(self.asked[rank] if rank == 1 else 7)
        return told

    def _end(self, rank: int, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result((rank, why))


def failing() -> "Future[int]":
    told: Future[int] = Future()
    told.set_exception(RuntimeError("gone"))
    return told


@pytest.mark.parametrize("answer", [None, Future, failing])
def test_an_engine_without_steps_is_ended(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it says so, says nothing, or cannot be asked."""
    engines = Engines(monkeypatch, answer)
    call: Future[None] = engines.watch.watch(0, Future())
    assert engines.ended.result(timeout=_LONG) == (0, "has made no step for 0.3 s")
    call.set_result(None)


def test_new_calls_do_not_put_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    engines.watch.watch(0, Future())
    while not engines.ended.done() and engines.asked[0] < 100 * _LONG:
        engines.watch.watch(0, Future()).set_result(None)
    assert engines.ended.result(timeout=_LONG)[0] == 0


def test_an_engine_with_steps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a call takes."""
    engines = Engines(monkeypatch)
    call: Future[None] = engines.watch.watch(1, Future())
    engines.worked.result(timeout=_LONG)
    call.set_result(None)
    assert not engines.ended.done()
