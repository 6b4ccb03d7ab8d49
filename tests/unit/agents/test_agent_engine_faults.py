"""An engine of agents whose processes hang or do not start, and which ends."""

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_model import RandomModel
from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.call_generator import CallResult
from rlflow.agents.endpoint import process
from rlflow.agents.episode import Episode
from rlflow.agents.episode_calls import EpisodeCalls
from rlflow.agents.messages import Call, CancelCall
from rlflow.agents.record import EpisodeRecord, RecordedCall
from rlflow.agents.trajectories import Rollout, build_trajectories
from rlflow.engines.group_progress import GroupProgress, PartialResponse
from rlflow.errors import EngineError
from rlflow.system.processes import descendants
from tests.unit.agents.test_agent_engine import LIMIT_S, SAMPLING, options, run, samples_of


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begin(engine: AgentEngine, model: RandomModel, rows: list[dict[str, Any]]) -> list[Any]:
    """Start episodes, and return when each waits for a call."""
    model.is_held = True
    futures = engine.submit(samples_of(rows), SAMPLING)
    wait_until(lambda: len(model._held) == len(rows))
    return futures


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [True, False], ids=["stop", "garbage"])
def test_an_engine_ends_with_its_processes_and_its_folder(is_told: bool) -> None:
    before, model = set(descendants(os.getpid())), RandomModel()
    engine = AgentEngine(model, options("tokens"))
    futures, folder = begin(engine, model, [{"turns": 3}] * 2), Path(engine._host._model.tokenizer)
    assert folder.is_dir()
    assert len(set(descendants(os.getpid())) - before) >= 3
    if is_told:
        engine.stop()
        with pytest.raises(EngineError):
            futures[0].result(LIMIT_S)
    del engine, futures
    model._held.clear()
    wait_until(lambda: gc.collect() is not None and not set(descendants(os.getpid())) - before)
    assert not folder.exists()


@pytest.mark.slow
def test_an_endpoint_that_hangs_is_replaced_and_no_agent_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MAX_SILENT_CHECKS", 5)
    expected = run(AgentEngine(RandomModel(), options("tokens")), [{"turns": 6}] * 2)
    model = RandomModel()
    engine = AgentEngine(model, options("tokens", timeout_s=2, retries=0))
    rows = [{"turns": 6}] * 2
    futures = begin(engine, model, rows)
    os.kill(engine._host._endpoint.pid, signal.SIGSTOP)
    model.release()
    batch = engine.rollouts(samples_of(rows), [future.result(LIMIT_S) for future in futures], SAMPLING)
    assert engine._host.num_endpoints == 2
    assert np.array_equal(batch.response_ids.values, expected.response_ids.values)


@pytest.mark.slow
def test_an_episode_that_continues_here_keeps_its_environment(tmp_path: Path) -> None:
    model = RandomModel()
    engine = AgentEngine(model, options("Faulty", options={"folder": str(tmp_path)}))
    rows = [{"number": 0, "failures": 0, "fault": ""}]
    samples, futures = samples_of(rows), begin(engine, model, rows)
    for _ in range(2):  # in the first call, and in the second
        engine.abort(futures)
        interrupted = engine.rollouts(samples, [future.result(0) for future in futures], SAMPLING)
        partial = GroupProgress(samples, SAMPLING, interrupted).partial_responses(np.arange(1))
        futures = engine.submit(samples, SAMPLING, partial)
        wait_until(lambda: model._held)
        if not (tmp_path / "0").exists():
            model.release()
            model.is_held = True
            wait_until(lambda: model._held)
    model.release()
    assert futures[0].result(LIMIT_S).is_done
    assert (tmp_path / "0").read_text() == ".", "one attempt"


@pytest.mark.slow
def test_an_episode_that_cannot_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AgentEngine(RandomModel(), options("tokens"))

    def start(*_: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(engine._host, "start", start)
    for future in engine.submit(samples_of([{"turns": 1}] * 2), SAMPLING):
        with pytest.raises(EngineError, match="too many open files"):
            future.result(LIMIT_S)


def test_a_client_that_gives_up_has_time_to_ask_again() -> None:
    model, key, ids = RandomModel(), np.array([3, 0, 0]), np.array([1, 2], np.int32)
    model.is_held = True
    episode = Episode(key, ids, {}, SAMPLING, EpisodeRecord())
    calls = EpisodeCalls(model, 4, {"name": episode}, lambda answers: None, lambda *ended: None)
    calls.take([Call(1, "name", ids.tobytes(), 12)])
    assert episode.idle_since == 0
    calls.cancel([CancelCall(1)])
    assert episode.idle_since > 0
    assert not episode.generating


def test_an_episode_that_moves_keeps_the_calls_of_earlier_attempts() -> None:
    reply = PartialResponse(np.array([5, 6], np.int32), np.zeros(2, np.float32), np.ones(2, np.int32))
    record, samples = EpisodeRecord(), samples_of([{}])
    name = record.name_of(b"prompt", 12, False)
    record.calls[name] = RecordedCall(CallResult(reply, True, True, "text"), np.array([1, 2], np.int32), 12)
    record.begin_attempt()
    interrupted = build_trajectories(samples, [Rollout(record)], 1.0)
    (partial,) = GroupProgress(samples, SAMPLING, interrupted).partial_responses(np.arange(1))
    moved = EpisodeRecord.from_partial(partial)
    assert moved.calls[name].ids.tolist() == [5, 6]
    assert moved.calls[name].result.is_done
