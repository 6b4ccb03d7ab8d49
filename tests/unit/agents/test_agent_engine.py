"""Episodes on an engine: real endpoint and worker processes, and a model of random tokens."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_model import RandomModel, logprobs_of
from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.options import AgentOptions
from rlflow.batch import Conversations, Packed, Prompts
from rlflow.batch.segments import unfold
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress
from rlflow.errors import EngineError, EnvironmentFailedError, RecipeError
from rlflow.rewards.workers import ForkedWorker, ForkServer
from tests.unit.agents import agents_of_tests

HERE = agents_of_tests.__name__
SAMPLING = Sampling(max_tokens=400, temperature=1.0)
LIMIT_S = 60.0

pytestmark = pytest.mark.slow


def options(agent: str, **changes: Any) -> AgentOptions:
    return AgentOptions(
        environment=f"{HERE}:{agent}",
        **{"max_calls": 100, "turn_tokens": 12, "max_tokens": 400, "processes": 1} | changes,
    )


def samples_of(rows: list[dict[str, Any]]) -> Prompts:
    keys = np.array([[3, number, 0] for number in range(len(rows))])
    return Prompts(keys=keys, ids=Packed.from_rows([[1, 2]] * len(rows), np.int32), rows=tuple(rows))


def run(engine: AgentEngine, rows: list[dict[str, Any]]) -> Conversations:
    samples = samples_of(rows)
    futures = engine.submit(samples, SAMPLING)
    return engine.rollouts(samples, [future.result(LIMIT_S) for future in futures], SAMPLING)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def trees() -> AgentEngine:
    return AgentEngine(RandomModel(), options("tree", max_calls=30))


def test_a_conversation_in_tokens_is_one_segment() -> None:
    batch = run(AgentEngine(RandomModel(), options("tokens")), [{"turns": 3}, {"turns": 1}])
    segments = unfold(batch.as_sequences())
    assert len(segments) == 2
    assert [segments.prompt_ids[row].tolist() for row in range(2)] == [[1, 2, 3]] * 2
    turn = batch.turn[0].tolist()
    assert [turn[0], turn[-1], max(turn)] == [0, 2, 2]
    assert batch.response_ids[0][batch.turn[0] == -1].tolist() == [10, 11, 10, 11]
    assert [batch.turn_rewards[row].tolist() for row in range(2)] == [[1, 2, 3.5], [1.5]]
    assert [row["environment_reward"] for row in batch.rows] == [6.5, 1.5]
    assert batch.finished.all()
    assert batch.turn_seconds is not None
    assert batch.turn_seconds.lengths.tolist() == [6, 2]
    assert (batch.turn_seconds.values >= 0).all()


def test_each_sampled_token_is_trained_once_and_read_as_it_was_sampled(trees: AgentEngine) -> None:
    batch = run(trees, [{"turns": 6}] * 40)
    assert batch.turn_lengths.lengths.mean() > 6
    segments = unfold(batch.as_sequences())
    assert len(segments) > len(batch)
    row = 0
    for trajectory in range(len(batch)):
        counts = batch.prompt_segments.runs_per_row[trajectory]  # type: ignore[union-attr, index]
        own, logprobs = batch.turn[trajectory] >= 0, batch.logprobs[trajectory]
        start = 0
        for _ in range(counts):
            prompt, response = segments.prompt_ids[row].tolist(), segments.response_ids[row].tolist()
            expected = logprobs_of(prompt, response)
            piece = slice(start, start + len(response))
            assert np.array_equal(logprobs[piece][own[piece]], expected[own[piece]])
            start, row = start + len(response), row + 1
    replies = {(tuple(trajectory), turn) for trajectory in batch.keys.tolist() for turn in range(30)}
    assert len(replies) == 40 * 30
    assert batch.own_tokens().sums.sum() == sum(map(len, batch.logprobs.values[batch.own_tokens().values][:, None]))


def test_samples_do_not_depend_on_the_order_of_arrival(trees: AgentEngine) -> None:
    rows = [{"turns": 5}] * 8
    first, second = run(trees, rows), run(AgentEngine(RandomModel(), options("tree", max_calls=30, processes=2)), rows)
    for row in range(8):
        assert sorted(first.response_ids[row].tolist()) == sorted(second.response_ids[row].tolist())


def test_a_chat_is_one_segment_of_random_tokens() -> None:
    batch = run(AgentEngine(RandomModel(), options("chat")), [{"turns": 8, "prompt": "hello"}] * 6)
    assert len(unfold(batch.as_sequences())) == 6
    assert batch.turn_rewards.lengths.tolist() == [8] * 6
    assert "rerendered" not in " ".join(batch.metrics())


def test_limits_cut_an_episode() -> None:
    engine = AgentEngine(RandomModel(), options("tokens", max_calls=2, max_tokens=60))
    batch = run(engine, [{"turns": 3}])
    assert not batch.finished[0]
    assert batch.turn_rewards[0].tolist() == [1, 2]
    short = AgentEngine(RandomModel(mean_tokens=1e9), options("tokens", max_tokens=26))
    batch = run(short, [{"turns": 5}])
    assert not batch.finished[0]
    assert batch.turn_rewards.lengths.tolist() == [2], "3 + 12 + 2 + 9 tokens are the limit"


@pytest.mark.parametrize("fault", ["raise", "exit", "sleep", "block"])
def test_a_failed_episode_is_tried_again_and_answered_from_the_record(fault: str, tmp_path: Path) -> None:
    model = RandomModel()
    limits = {"timeout_s": 1.5} if fault in ("sleep", "block") else {}
    engine = AgentEngine(model, options("Faulty", options={"folder": str(tmp_path)}, **limits))
    rows = [{"number": number, "failures": 1 if number == 1 else 0, "fault": fault} for number in range(3)]
    batch = run(engine, rows)
    assert (tmp_path / "1").read_text() == ".."
    assert model.calls == 6, "nothing is generated twice"
    assert [measures["retries"] for measures in batch.measures] == [0, 1, 0]
    assert batch.metrics()["tool_s"] == 0.25
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    undisturbed = AgentEngine(RandomModel(), options("Faulty", options={"folder": str(fresh)}))
    expected = run(undisturbed, [{**row, "failures": 0} for row in rows])
    assert np.array_equal(batch.response_ids.values, expected.response_ids.values)
    assert np.array_equal(batch.logprobs.values, expected.logprobs.values)


def test_an_episode_that_always_fails(tmp_path: Path) -> None:
    row = {"number": 0, "failures": 99, "fault": "raise"}
    chosen = options("Faulty", options={"folder": str(tmp_path)})
    with pytest.raises(RecipeError, match="the shop is closed"):
        run(AgentEngine(RandomModel(), chosen), [row])
    assert (tmp_path / "0").read_text() == "..."
    batch = run(AgentEngine(RandomModel(), replace(chosen, on_failure="exclude", retries=0)), [row])
    assert batch.failed.tolist() == [True]
    assert "the shop is closed" in batch.reasons[0]


def test_a_worker_that_does_not_get_ready_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = [], ForkServer.start_worker

    def start_late(server: ForkServer) -> ForkedWorker:
        starts.append(server)
        if len(starts) < 3:
            raise EngineError("it was not ready in time")
        return start(server)

    monkeypatch.setattr(ForkServer, "start_worker", start_late)
    batch = run(AgentEngine(RandomModel(), options("tokens")), [{"turns": 1}])
    assert batch.measures[0]["retries"] == 0


def test_workers_that_always_die(tmp_path: Path) -> None:
    row = {"number": 0, "failures": 99, "fault": "exit"}
    with pytest.raises(EnvironmentFailedError, match="exit code 3"):
        run(AgentEngine(RandomModel(), options("Faulty", options={"folder": str(tmp_path)})), [row])


@pytest.mark.parametrize("moves", [False, True], ids=["same engine", "another engine"])
def test_an_interrupted_episode_continues(moves: bool) -> None:
    chosen, rows = options("tokens"), [{"turns": 6}, {"turns": 4}]
    expected = run(AgentEngine(RandomModel(), chosen), rows)
    model = RandomModel()
    engine, samples = AgentEngine(model, chosen), samples_of(rows)
    model.is_held = True
    futures = engine.submit(samples, SAMPLING)
    wait_for(lambda: len(model._held) == 2)
    engine.abort(futures)
    interrupted = engine.rollouts(samples, [future.result(0) for future in futures], SAMPLING)
    assert (interrupted.unfinished.lengths > 0).all()
    partial = GroupProgress(samples, SAMPLING, interrupted).partial_responses(np.arange(2))
    model.release()
    if moves:
        engine = AgentEngine(RandomModel(), chosen)
    assert engine.interrupted_rows(samples, 1).tolist() == ([] if moves else [0, 1])
    futures = engine.submit(samples, SAMPLING, partial)
    batch = engine.rollouts(samples, [future.result(LIMIT_S) for future in futures], SAMPLING)
    assert np.array_equal(batch.response_ids.values, expected.response_ids.values)
    assert np.array_equal(batch.turn.values, expected.turn.values)
    assert batch.turn_rewards.values.tolist() == expected.turn_rewards.values.tolist()


def test_an_endpoint_that_dies_is_replaced() -> None:
    chosen, rows = options("tokens"), [{"turns": 6}] * 3
    expected = run(AgentEngine(RandomModel(), chosen), rows)
    model = RandomModel()
    engine, samples = AgentEngine(model, chosen), samples_of(rows)
    model.is_held = True
    futures = engine.submit(samples, SAMPLING)
    wait_for(lambda: len(model._held) == 3)
    os.kill(engine._host._endpoint.pid, signal.SIGKILL)
    model.release()
    batch = engine.rollouts(samples, [future.result(LIMIT_S) for future in futures], SAMPLING)
    assert np.array_equal(batch.response_ids.values, expected.response_ids.values)
