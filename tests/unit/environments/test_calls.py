"""Calls of an environment in worker processes, from one thread after another."""

import gc
import os
import signal
from concurrent.futures import wait
from pathlib import Path

import pytest

from rlflow.environments.calls import EnvironmentCalls
from rlflow.environments.turn import EnvironmentSpec, TurnResult
from rlflow.errors import EngineError
from rlflow.rewards import pool as pool_module
from rlflow.rewards.base import Failure
from rlflow.rewards.pool import ProcessPool
from tests.unit.environments import meeting, misbehaving

LIMIT_S = 30.0


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[ProcessPool]:
    """Return a list that receives all pools."""
    made: list[ProcessPool] = []
    make = ProcessPool.__init__

    def note(self: ProcessPool, *arguments: object, **named: object) -> None:
        make(self, *arguments, **named)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(pool_module.ProcessPool, "__init__", note)
    return made


@pytest.fixture
def calls() -> EnvironmentCalls:
    return EnvironmentCalls(EnvironmentSpec(f"{misbehaving.__name__}:Misbehaving", {}, 10.0), 2)


def test_answers_belong_to_their_questions(calls: EnvironmentCalls) -> None:
    """Two calls of up to four turns each, one of which ends its process."""
    texts = ["good", "end", "its own kind", "raise", "good"]
    first = [each.result(LIMIT_S) for each in calls.submit([(text, {}, None) for text in texts])]
    assert [answer.text if isinstance(answer, TurnResult) else answer.kind for answer in first] == [
        *("1", "", "1", "raised", "1")
    ]
    state = first[0].state if isinstance(first[0], TurnResult) else None
    (second,) = calls.submit([("good", {}, state)])
    again = second.result(LIMIT_S)
    assert isinstance(again, TurnResult)
    assert again.text == "2"


def test_an_answer_has_at_most_16_mib(calls: EnvironmentCalls) -> None:
    (call,) = calls.submit([("keep much", {}, None)])
    answer = call.result(LIMIT_S)
    assert isinstance(answer, Failure)
    assert "returned 17 MiB, more than 16" in answer.reason


def test_a_call_is_answered_while_another_takes_its_time(tmp_path: Path) -> None:
    file = tmp_path / "ended"
    calls = EnvironmentCalls(
        EnvironmentSpec(f"{meeting.__name__}:Meeting", {"file": str(file), "waits": True}, LIMIT_S), 2
    )
    (late,) = calls.submit([("", {"name": "late"}, None)])
    state = None
    for _ in range(meeting.TURNS):
        assert not late.done()
        (early,) = calls.submit([("", {"name": "early"}, state)])
        answer = early.result(LIMIT_S)
        assert isinstance(answer, TurnResult)
        state = answer.state
    assert isinstance(late.result(LIMIT_S), TurnResult)


def test_processes_end_with_their_object(pools: list[ProcessPool]) -> None:
    calls = EnvironmentCalls(EnvironmentSpec(f"{misbehaving.__name__}:Misbehaving", {}, 10.0), 1)
    wait(calls.submit([("good", {}, None)]), LIMIT_S)
    (pool,) = pools
    stopped = pool.stop
    del calls, pool
    pools.clear()
    while stopped.alive:
        # At the first collection, a thread of the pool may still refer to it.
        gc.collect()


def test_calls_fail_with_their_fork_server(pools: list[ProcessPool]) -> None:
    calls = EnvironmentCalls(EnvironmentSpec(f"{misbehaving.__name__}:Misbehaving", {}, 10.0), 1)
    os.kill(pools[0].fork_server.pid, signal.SIGKILL)
    for _ in range(2):
        (future,) = calls.submit([("good", {}, None)])
        with pytest.raises(EngineError, match="the fork server of reward functions has died"):
            future.result(LIMIT_S)


def test_a_worker_that_dies_between_calls_is_replaced(pools: list[ProcessPool]) -> None:
    calls = EnvironmentCalls(EnvironmentSpec(f"{misbehaving.__name__}:Misbehaving", {}, 10.0), 1)
    wait(calls.submit([("good", {}, None)]), LIMIT_S)
    os.kill(pools[0].workers[0].pid, signal.SIGKILL)
    while pools[0].workers:
        os.sched_yield()
    (future,) = calls.submit([("good", {}, None)])
    assert not isinstance(future.result(LIMIT_S), Failure)
