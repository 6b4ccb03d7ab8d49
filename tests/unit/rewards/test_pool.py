"""Functions in workers: whatever they do, each call has an outcome in time, and the pool stays whole."""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from rlflow.errors import EngineError
from rlflow.rewards import base, workers
from rlflow.rewards.base import Failure, Kind, Outcome
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import ProcessPool
from rlflow.system.processes import children, descendants
from tests.unit.rewards import misbehaving

DEADLINE_S = 0.5
# A call that hangs never ends; the pool itself waits 30 s for a process to start.
LATE_S = 15.0
# The most that a test waits for an outcome.
LIMIT_S = 200.0
MODULE = misbehaving.__name__
# The first message of a worker.
READY = pickle.dumps(None)


def part(function: str = "reward", timeout_s: float = DEADLINE_S) -> RewardTerm:
    return RewardTerm(function=f"{MODULE}:{function}", timeout_s=timeout_s)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    parts = {
        "does": part(),
        "by_fours": part("by_fours"),
        "waits": part("waits"),
        "brief": part(timeout_s=0.02),
        # On a busy machine a new worker may answer late.
        "patient": part(timeout_s=30.0),
    }
    pool = ProcessPool(parts, num_workers=2)
    yield pool
    pool.stop()


def pids(pool: ProcessPool) -> list[int]:
    """Return the process ids of the pool's workers."""
    return sorted(worker.pid for worker in pool.fork_server.workers)


def outcomes(pool: ProcessPool, texts: list[str], name: str = "does") -> list[Outcome]:
    return [future.result(LIMIT_S) for future in pool.submit(name, texts, [{}] * len(texts))]


@pytest.mark.parametrize(
    ("does", "kind", "reason"),
    [
        ("hang", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("hang on", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("sleep", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("stop itself", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("leave a daemon", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("close everything", "died", "ended its process"),
        ("exit", "died", "ended its process (exit code 0)"),
        ("kill itself", "died", "ended its process (SIGKILL)"),
        ("kill itself by another", "died", "ended its process (signal 40)"),
        ("crash", "died", "ended its process (SIGSEGV)"),
        ("exit politely", "raised", "failed (SystemExit: 0)"),
        ("interrupt", "raised", "failed (KeyboardInterrupt)"),
        ("recurse", "raised", "failed (RecursionError: maximum recursion depth exceeded)"),
        ("8 GB", "raised", "failed (MemoryError)"),
        ("nothing", "raised", "failed (TypeError: 'NoneType' object is not iterable)"),
        ("NaN", "invalid", "returned nan for the response 'NaN'"),
        ("infinite", "invalid", "returned -inf for the response 'infinite'"),
        ("huge", "invalid", "returned 1e+39 for the response 'huge'"),
        ("a text", "invalid", "returned the text 'no' instead of a number"),
        ("number as text", "invalid", "returned the text '2.5' instead of a number"),
        ("too few", "invalid", "returned 0 values for 1 response"),
        ("too many", "invalid", "returned more than 1 values for 1 response"),
        ("endless", "invalid", "returned more than 1 values for 1 response"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_a_reason(does: str, kind: Kind, reason: str, pool: ProcessPool) -> None:
    began = time.monotonic()
    name = "does" if kind == "timeout" else "patient"
    calls = [("patient", "good"), (name, does), ("patient", "good")]
    before, failure, after = (pool.submit(name, [text], [{}])[0] for name, text in calls)
    assert (before.result(LIMIT_S), after.result(LIMIT_S)) == (1.5, 1.5)
    outcome = failure.result(LIMIT_S)
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    assert outcome.reason.startswith(reason)
    assert time.monotonic() - began < LATE_S
    assert outcomes(pool, ["good"] * 5, "patient") == [1.5] * 5
    workers = pids(pool)
    assert len(workers) <= 2
    assert [below for worker in workers for below in descendants(worker)] == []
    assert sorted(children(pool.fork_server.pid)) == workers, "nothing is left of what was killed"


def test_of_a_batch_only_the_response_that_hangs_fails(pool: ProcessPool) -> None:
    found = outcomes(pool, ["a", "b", "hang", "d", "e"], "by_fours")
    assert found == [2.0, 2.0, Failure("timeout", "took longer than its timeout_s of 0.5 s"), 1.0, 1.0]


@pytest.mark.slow
def test_calls_of_functions_with_their_own_timeout_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_GRACE_S", 0.2)
    pool = ProcessPool({"told": part("told_its_time", 0.3)}, num_workers=1)
    start = Mock(wraps=pool.fork_server.start_worker)
    monkeypatch.setattr(pool.fork_server, "start_worker", start)
    assert outcomes(pool, ["a"] * 4, "told") == [Failure("timeout", "took longer than its timeout_s of 0.3 s")] * 4
    assert start.call_count == 1, "each response alone would end a worker of its own"
    pool.stop()


def test_reasons_are_cut() -> None:
    assert Failure("raised", "x" * 1000).reason == "x" * 300


class SlowStart:
    """A worker in place of a process: a thread that ``start`` plays, to which a fork server's requests go."""

    def __init__(self, start: Callable[[socket.socket], object]) -> None:
        self._start = start
        self.ended: list[int] = []

    def request(self, number: int, descriptors: list[int]) -> int:
        """Start the worker and return its process id, or end it and return its exit code."""
        if number:
            self.ended.append(number)
            return 3
        threading.Thread(target=self._run, args=[socket.socket(fileno=os.dup(descriptors[0]))], daemon=True).start()
        return 1

    def _run(self, end: socket.socket) -> None:
        with end:
            self._start(end)


@pytest.mark.slow
def test_the_time_that_a_worker_needs_to_start_is_not_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool({"does": part()}, num_workers=1)

    def start(end: socket.socket) -> None:
        time.sleep(1.5 * DEADLINE_S)
        end.sendall(READY)
        pickle.load(end.makefile("rb"))
        end.sendall(pickle.dumps([1.5]))

    monkeypatch.setattr(pool.fork_server, "_request", SlowStart(start).request)
    assert outcomes(pool, ["good"]) == [1.5]
    monkeypatch.undo()
    pool.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "reason"),
    [
        pytest.param(lambda end: end.recv(1), "it was not ready in time", id="late"),
        pytest.param(id, r"it ended \(exit code 3\)", id="dead"),
    ],
)
def test_a_worker_that_is_never_ready_is_an_error(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[socket.socket], object], reason: str
) -> None:
    pool = ProcessPool({"does": part()}, num_workers=1)
    worker = SlowStart(start)
    monkeypatch.setattr(workers, "_ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pool.fork_server, "_request", worker.request)
    with pytest.raises(EngineError, match=f"a worker process of reward functions did not start: {reason}"):
        outcomes(pool, ["good"])
    assert (worker.ended, pool.fork_server.workers) == ([1], [])
    monkeypatch.undo()
    pool.stop()


def test_a_worker_that_does_not_read_its_call(pool: ProcessPool) -> None:
    assert outcomes(pool, ["good"] * 9, "patient") == [1.5] * 9
    for pid in pids(pool):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    stopped = [pool.submit("does", ["good"], [{"blob": "x" * 10**7}])[0] for _ in pids(pool)]
    late = Failure("timeout", "took longer than its timeout_s of 0.5 s")
    assert all(future.result(LIMIT_S) == late for future in stopped)
    assert time.monotonic() - began < LATE_S
    assert outcomes(pool, ["good"] * 9, "patient") == [1.5] * 9


def test_calls_behind_one_that_hangs(pool: ProcessPool) -> None:
    """More than a socket holds: nobody waits for a worker to read."""
    began = time.monotonic()
    (hanging,) = pool.submit("does", ["hang"], [{}])
    good = pool.submit("patient", ["good"] * 20, [{"blob": "x" * 10**6}] * 20)
    assert [future.result(LIMIT_S) for future in good] == [1.5] * 20
    assert hanging.result(LIMIT_S) == Failure("timeout", "took longer than its timeout_s of 0.5 s")
    assert time.monotonic() - began < LATE_S


def test_cancelled_calls_are_left_out(pool: ProcessPool) -> None:
    hanging = pool.submit("does", ["hang", "hang"], [{}] * 2)
    cancelled = pool.submit("does", ["hang"] * 100, [{}] * 100)
    assert all(future.cancel() for future in cancelled)
    began = time.monotonic()
    assert outcomes(pool, ["another number"] * 2, "patient") == [2.5, 2.5]
    assert time.monotonic() - began < LATE_S
    assert [future.result(LIMIT_S).kind for future in hanging] == ["timeout"] * 2


def test_a_future_may_be_cancelled_during_its_call(pool: ProcessPool) -> None:
    hanging = pool.submit("does", ["hang", "hang"], [{}] * 2)
    wait(pool.submit("patient", ["good"], [{}]), 0.1)
    assert all(future.cancel() for future in hanging)
    assert outcomes(pool, ["another number"] * 2, "patient") == [2.5, 2.5]


def test_threads_get_the_outcomes_of_their_own_calls(pool: ProcessPool) -> None:
    with ThreadPoolExecutor(2) as threads:
        good, other = (threads.submit(outcomes, pool, [text] * 300, "patient") for text in ("good", "another number"))
    assert (good.result(), other.result()) == ([1.5] * 300, [2.5] * 300)


def test_rows_that_cannot_be_sent_are_an_error(pool: ProcessPool) -> None:
    (future,) = pool.submit("patient", ["good"], [{"row": threading.Lock()}])
    with pytest.raises(TypeError, match="cannot pickle"):
        future.result(LIMIT_S)


@pytest.mark.slow
def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    assert outcomes(pool, ["good"]) == [1.5]
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert outcomes(pool, ["good"]) == [1.5]
    assert pids(pool) != [pid]
    pool.stop()


@pytest.mark.slow
def test_a_pool_ends_with_its_object() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=2)
    assert outcomes(pool, ["good", "good"]) == [1.5, 1.5]
    processes = [pool.fork_server.pid, *pids(pool)]
    stop = pool.stop
    del pool
    while stop.alive:
        # At the first collection, a thread of the pool may still refer to it.
        gc.collect()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.slow
def test_a_worker_that_cannot_go_on_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    worker = pool.fork_server.start_worker()
    with pytest.raises(EOFError):
        worker.call(pickle.dumps(("unknown", [""], [{}])), 10.0)
    wait_for_end(worker.pid)
    assert pool.fork_server.end_worker(worker) == "exit code 1"
    assert "KeyError: 'unknown'" in capfd.readouterr().err
    pool.stop()


def state(pid: float) -> str | None:
    """Return the state of a process from /proc."""
    try:
        return Path(f"/proc/{pid:.0f}/stat").read_text().split()[2]
    except OSError:
        return None


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + LATE_S
    while state(pid) not in (None, "Z") and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_dead_fork_server_is_an_error() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    assert outcomes(pool, ["good"]) == [1.5]
    pool.fork_server.stop()
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        outcomes(pool, ["good"])
    pool.stop()


@pytest.mark.slow
def test_a_late_answer_of_the_fork_server_is_not_confused_with_the_next() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    pool.fork_server._socket.settimeout(0.1)
    os.kill(pool.fork_server.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        pool.fork_server.start_worker()
    os.kill(pool.fork_server.pid, signal.SIGCONT)
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        pool.fork_server.start_worker()
    pool.stop()


@pytest.mark.slow
def test_processes_of_a_module_end_with_the_pool() -> None:
    pool = ProcessPool({"helped": RewardTerm(function="tests.unit.rewards.helped:reward")}, num_workers=1)
    started_here = sys.modules["tests.unit.rewards.helped"].HELPER
    started_here.kill()
    started_here.wait()
    (helper,) = outcomes(pool, ["good"], "helped")
    assert isinstance(helper, float)
    assert outcomes(pool, ["exit", "good"], "helped") == [Failure("died", "ended its process (exit code 0)"), helper]
    assert state(helper) == "S"
    pool.stop()
    assert state(helper) in (None, "Z")


@pytest.mark.slow
def test_a_function_that_only_this_process_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its module has been made by hand; where workers are forked there is no such file."""
    module = ModuleType("made_here")
    module.reward = misbehaving.reward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    with pytest.raises(EngineError, match=r"^reward 'made_here' cannot be loaded in the fork server: function: 'made"):
        ProcessPool({"made_here": RewardTerm(function="made_here:reward")})


def test_a_process_has_200_async_calls_in_flight(pool: ProcessPool) -> None:
    assert outcomes(pool, ["good"] * 200, "waits") == [200.0] * 200


def test_one_of_200_async_calls_that_raises_fails_alone(pool: ProcessPool) -> None:
    found = outcomes(pool, ["good"] * 150 + ["raise"] + ["good"] * 49, "waits")
    assert [place for place, outcome in enumerate(found) if isinstance(outcome, Failure)] == [150]
    assert max(outcome for outcome in found if isinstance(outcome, float)) == 100


@pytest.mark.parametrize(
    "deaths", [pytest.param(10, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)]
)
def test_no_call_is_lost_when_workers_die(deaths: int, pool: ProcessPool) -> None:
    found = outcomes(pool, ["good", "exit", "good", "another number"] * deaths, "patient")
    assert found[::2] == [1.5] * 2 * deaths
    assert found[1::4] == [Failure("died", "ended its process (exit code 0)")] * deaths
    assert found[3::4] == [2.5] * deaths


@pytest.mark.parametrize(
    "hangs", [pytest.param(20, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_the_pool_is_whole_after_many_hangs(hangs: int, pool: ProcessPool) -> None:
    late = Failure("timeout", "took longer than its timeout_s of 0.02 s")
    assert outcomes(pool, ["hang"] * hangs, "brief") == [late] * hangs
    assert outcomes(pool, ["good"] * hangs, "patient") == [1.5] * hangs
    assert sorted(children(pool.fork_server.pid)) == pids(pool)
    assert len(pids(pool)) <= 2


OWNER = """
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import ProcessPool

pool = ProcessPool({"does": RewardTerm(function="MODULE:reward", timeout_s=100.0)}, num_workers=1)
print(pool.submit("does", ["good"], [{}])[0].result(), flush=True)
pool.submit("does", ["hang on"], [{}])[0].result()
"""


@pytest.mark.slow
def test_all_of_it_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER.replace("MODULE", MODULE)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"1.5\n"
        owner.kill()
        # Fork server and worker have its standard output, which ends with the last of them.
        assert owner.communicate(timeout=10)[0] == b""
