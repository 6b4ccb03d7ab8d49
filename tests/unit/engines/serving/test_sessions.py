"""An engine reports its samples often, and not too often."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Prompts
from rlflow.engines.base import Sampling
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.journal import Journal
from rlflow.engines.serving import sessions
from rlflow.engines.serving.sessions import pack_rows
from tests.helpers import WritingEngine, prompts, spec

SAMPLING = Sampling(max_tokens=4, group_size=1)
GIVEN = prompts((2,) * 8)


class Manual(WritingEngine):
    """Finishes a sample when it is told to."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.futures: dict[int, Future[Any]] = {}
        self.samples: dict[int, Prompts] = {}

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        new = {prompt: Future[Any]() for prompt in samples.keys[:, 1].tolist()}
        self.samples |= {prompt: samples.take(np.array([row])) for row, prompt in enumerate(new)}
        self.futures |= new
        return list(new.values())

    def finish(self, *rows: int) -> None:
        for row in rows:
            rollouts = FakeEngine.generate(self, self.samples[row], SAMPLING)
            self.futures[row].set_result(SimpleNamespace(length=row + 1, is_done=True, rollouts=rollouts))


class Clock:
    """A clock that goes on when somebody waits, and finishes rows at their times."""

    def __init__(self, engine: Manual, ends: dict[float, int]) -> None:
        self.engine, self.ends, self.now = engine, ends, 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, queue: Any, timeout: float) -> Any:
        due = [at for at in sorted(self.ends) if at <= self.now + timeout]
        if not queue.empty():
            return queue.get_nowait()
        if not due:
            self.now += timeout
            raise Empty
        self.now = max(self.now, due[0])
        self.engine.finish(self.ends.pop(due[0]))
        return queue.get_nowait()


def reports(monkeypatch: pytest.MonkeyPatch, ends: dict[float, int], num_engines: int) -> list[tuple[float, Any]]:
    """Return when one of so many engines reports which rows, where one row is enough for a report."""
    engine = Manual()
    clock = Clock(engine, dict(ends))
    engine.begin_session(GIVEN, SAMPLING, num_engines)
    assert engine._session is not None
    completed = engine._session._completed
    monkeypatch.setattr(sessions, "time", clock)
    queue = SimpleNamespace(put=completed.put, get=lambda timeout: clock.wait(completed, timeout))
    monkeypatch.setattr(engine._session, "_completed", queue)
    found, asked = [], pack_rows(range(len(GIVEN)))
    while engine._session._generating or asked:
        progress = engine.advance(asked, 1)
        found.append((round(clock.now, 3), np.frombuffer(progress.rows, np.int32).tolist()))
        asked = b""
    return found


def test_rows_that_are_done_by_the_time_of_a_report_are_in_it() -> None:
    engine = Manual()
    engine.begin_session(GIVEN, SAMPLING)
    assert engine._session is not None
    engine._session._submit(np.arange(8), None)
    engine.finish(0, 3, 5)
    progress = engine.advance(b"", 1)
    assert np.frombuffer(progress.rows, np.int32).tolist() == [0, 3, 5]
    assert np.frombuffer(progress.lengths, np.int32).tolist() == [1, 4, 6]


def test_a_session_whose_samples_are_done_is_progress_without_decode_steps() -> None:
    """A resumed run may read the samples of many steps from its journal."""
    engine = Manual()
    before = engine.progress
    engine.begin_session(GIVEN, SAMPLING)
    assert engine._session is not None
    engine._session._submit(np.arange(8), None)
    assert engine.progress == before
    engine.finish(*range(8))
    engine.finish_session()
    assert engine.progress > before


ENDS = {0.01 * (row + 1): row for row in range(8)}


def test_reports_of_many_engines_are_some_time_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 15 engines leaves 30 ms between two reports. The report of the last row comes at once."""
    assert reports(monkeypatch, ENDS, 15) == [(0.01, [0]), (0.04, [1, 2, 3]), (0.07, [4, 5, 6]), (0.08, [7])]


def test_a_single_engine_reports_each_row_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reports(monkeypatch, ENDS, 1) == [(0.01 * (row + 1), [row]) for row in range(8)]


def test_finished_rows_are_recorded_within_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime meanwhile waits for all rows, of which the others take long."""
    engine = Manual()
    engine.journal = Journal(tmp_path, "actor")
    engine.begin_session(GIVEN, SAMPLING)
    assert engine._session is not None
    clock, completed = Clock(engine, {0.5: 3, 0.8: 1, **{10.0 + row: row for row in (0, 2, 4, 5, 6, 7)}}), Queue[int]()
    monkeypatch.setattr(sessions, "time", clock)
    waiting = SimpleNamespace(put=completed.put, get=lambda timeout: clock.wait(completed, timeout))
    monkeypatch.setattr(engine._session, "_completed", waiting)
    engine.advance(pack_rows(range(8)), 8)
    rows, _ = engine.journal.recorded(GIVEN.keys).find(GIVEN, SAMPLING)
    assert len(rows) == 2
    assert clock.now < 2
