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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from rlflow.errors import EngineError
from rlflow.rewards import callables, workers
from rlflow.rewards import pool as pool_module
from rlflow.rewards.base import Failure, Kind, Outcome
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.calls import Call, CallQueue
from rlflow.rewards.pool import ProcessPool
from rlflow.rewards.processes import Channel, children, descendants
from rlflow.rewards.workers import ForkedWorker
from tests.unit.rewards import misbehaving

DEADLINE_S = 0.5
# A call that hangs never ends; the pool itself waits 30 s for a process to start.
LATE_S = 15.0
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
        "brief": part(timeout_s=0.02),
        # On a busy machine a new worker may answer late.
        "patient": part(timeout_s=30.0),
    }
    pool = ProcessPool(parts, num_workers=2)
    yield pool
    pool.stop()


def outcomes(pool: ProcessPool, texts: list[str], name: str = "does", size: int = 1) -> list[Outcome]:
    calls = [
        Call(name, range(start, start + len(chosen)), chosen, [{}] * len(chosen))
        for start in range(0, len(texts), size)
        if (chosen := texts[start : start + size])
    ]
    found = {
        place: given for call, every in pool.outcomes(calls) for place, given in zip(call.indices, every, strict=True)
    }
    assert len(found) == len(texts)
    return [found[place] for place in range(len(texts))]


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
    calls = [Call("patient", [0], ["good"], [{}]), Call(name, [1], [does], [{}]), Call("patient", [2], ["good"], [{}])]
    found = {call.indices[0]: given for call, (given,) in pool.outcomes(calls)}
    assert (found[0], found[2]) == (1.5, 1.5)
    given = found[1]
    assert isinstance(given, Failure)
    assert given.kind == kind
    assert given.reason.startswith(reason)
    assert time.monotonic() - began < LATE_S
    assert outcomes(pool, ["good"] * 5, "patient") == [1.5] * 5
    workers = [worker.pid for worker in pool.workers]
    assert len(workers) == 2
    assert [below for worker in workers for below in descendants(worker)] == []
    assert sorted(children(pool.fork_server.pid)) == sorted(workers), "nothing is left of what was killed"


def test_of_a_batch_only_the_response_that_hangs_fails(pool: ProcessPool) -> None:
    found = outcomes(pool, ["a", "b", "hang", "d", "e"], "by_fours", 4)
    assert found == [1.0, 1.0, Failure("timeout", "took longer than its timeout_s of 0.5 s"), 1.0, 1.0]


def test_calls_of_functions_with_their_own_timeout_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "_GRACE_S", 0.2)
    pool = ProcessPool({"told": part("told_its_time", 0.3)}, num_workers=1)
    fork = Mock(wraps=pool.fork_server.fork)
    monkeypatch.setattr(pool.fork_server, "fork", fork)
    assert outcomes(pool, ["a"] * 4, "told", 4) == [Failure("timeout", "took longer than its timeout_s of 0.3 s")] * 4
    assert fork.call_count <= 2, "each response alone would end a worker of its own"
    pool.stop()


def test_reasons_are_cut() -> None:
    assert Failure("raised", "x" * 1000).reason == "x" * 300


def test_a_worker_that_reads_nothing_gets_few_calls() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = ForkedWorker(0, ours)
        Channel(theirs).send(READY)
        assert worker.receive() == []
        while worker.submit(Call("does", [0], ["good"], [{}]), 5.0):
            assert len(worker.pending) < 100


class Clock:
    """A clock in place of the module ``time``, which goes on by ``step`` seconds at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step
        self._looks, self._looked = 0, threading.Condition()
        for module in (pool_module, workers):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.now += self.step
        with self._looked:
            now, self._looks = self.now, self._looks + 1
            self._looked.notify()
        return now

    def wait_for(self, looks: int) -> None:
        """Return when it has been looked at so many times."""
        with self._looked:
            self._looked.wait_for(lambda: self._looks >= looks)


class SlowStart:
    """A pool's fork server whose one worker is a thread of this process, played by ``work``."""

    def __init__(self, work: Callable[[Channel], object]) -> None:
        self._work = work
        self.ended: list[int] = []

    def fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._run, args=[theirs], daemon=True).start()
        return 1, ours

    def _run(self, end: socket.socket) -> None:
        with end:
            self._work(Channel(end))

    def end(self, pid: int) -> int:
        self.ended.append(pid)
        return 3


def test_the_time_that_a_worker_needs_to_start_is_not_the_calls(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    def work(channel: Channel) -> None:
        # The process was started, and the pool waits for it: a call sent by now would be late.
        clock.wait_for(looks=2)
        clock.now += 10 * DEADLINE_S
        channel.send(READY)
        while not (calls := channel.receive()):
            assert calls is not None
        # The pool has read that the process is ready, has sent the call and waits for the answer.
        clock.wait_for(looks=5)
        channel.send(pickle.dumps([1.5]))

    monkeypatch.setattr(pool, "workers", [])
    monkeypatch.setattr(pool, "num_workers", 1)
    monkeypatch.setattr(pool, "fork_server", SlowStart(work))
    assert outcomes(pool, ["good"]) == [1.5]
    pool._end(pool.workers[0])


@pytest.mark.parametrize(
    ("work", "seconds", "reason"),
    [
        pytest.param(Channel.receive, 40.0, "it was not ready in time", id="late"),
        pytest.param(id, 0.0, r"it ended \(exit code 3\)", id="dead"),
    ],
)
def test_a_worker_that_is_never_ready_is_an_error(
    pool: ProcessPool,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Channel], object],
    seconds: float,
    reason: str,
) -> None:
    Clock(monkeypatch, step=seconds)
    server = SlowStart(work)
    monkeypatch.setattr(pool, "workers", [])
    monkeypatch.setattr(pool, "num_workers", 1)
    monkeypatch.setattr(pool, "fork_server", server)
    with pytest.raises(EngineError, match=f"a worker process of reward functions did not start: {reason}"):
        outcomes(pool, ["good"])
    assert (server.ended, pool.workers) == ([1], [])


def test_a_worker_that_does_not_read_its_first_call(pool: ProcessPool) -> None:
    assert outcomes(pool, ["good"] * 9, "patient") == [1.5] * 9
    for worker in pool.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    call = Call("does", [0], ["good"], [{"blob": "x" * 10**7}])
    assert list(pool.outcomes([call])) == [(call, [Failure("timeout", "took longer than its timeout_s of 0.5 s")])]
    assert time.monotonic() - began < LATE_S
    for worker in pool.workers:
        os.kill(worker.pid, signal.SIGCONT)
    assert outcomes(pool, ["good"] * 9, "patient") == [1.5] * 9


def test_large_texts_queued_after_a_call_that_hangs(pool: ProcessPool) -> None:
    """More than a socket holds: nobody waits for a worker to read."""
    calls = [
        Call("patient" if place else "does", [place], [text], [{"blob": "x" * 10**6}])
        for place, text in enumerate(["hang", *["good"] * 20])
    ]
    began = time.monotonic()
    given = {call.indices[0]: every[0] for call, every in pool.outcomes(calls)}
    late = Failure("timeout", "took longer than its timeout_s of 0.5 s")
    assert given == {0: late, **dict.fromkeys(range(1, 21), 1.5)}
    assert time.monotonic() - began < LATE_S


def test_abandoned_calls_leave_no_answers(pool: ProcessPool) -> None:
    calls = [Call("patient", [0], [text], [{}]) for text in ["good", "NaN", "infinite"] * 10]
    found = pool.outcomes(calls)
    next(found)
    found.close()
    assert outcomes(pool, ["another number", "another number"], "patient") == [2.5, 2.5]


def test_threads_get_the_outcomes_of_their_own_calls(pool: ProcessPool) -> None:
    with ThreadPoolExecutor(2) as threads:
        good, other = (threads.submit(outcomes, pool, [text] * 300, "patient") for text in ("good", "another number"))
    assert (good.result(), other.result()) == ([1.5] * 300, [2.5] * 300)


@pytest.mark.timeout(60)
def test_a_queue_that_closes_while_its_calls_are_taken_ends_the_work() -> None:
    """Taking the calls also takes the notice that wakes the pool."""

    class ClosingQueue(CallQueue):
        def take(self) -> list[Call]:
            self.close()
            return super().take()

    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    assert list(pool.outcomes(ClosingQueue())) == []
    pool.stop()


def test_a_pool_ends_with_its_object() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=2)
    assert outcomes(pool, ["good", "good"]) == [1.5, 1.5]
    processes = [pool.fork_server.pid, *(worker.pid for worker in pool.workers)]
    del pool
    gc.collect()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_a_worker_that_cannot_go_on_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    pid, end = pool.fork_server.fork()
    with end:
        Channel(end).send(pickle.dumps(("unknown", [""], [{}])))
        until = time.monotonic() + 10
        while state(pid) != "Z" and time.monotonic() < until:
            time.sleep(0.01)
        assert pool.fork_server.end(pid) == 1
    assert "KeyError: 'unknown'" in capfd.readouterr().err
    pool.stop()


def state(pid: float) -> str | None:
    """Return the state of a process from /proc."""
    try:
        return Path(f"/proc/{pid:.0f}/stat").read_text().split()[2]
    except OSError:
        return None


def test_a_dead_fork_server_is_an_error() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    assert outcomes(pool, ["good"]) == [1.5]
    pool.fork_server.stop()
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        outcomes(pool, ["good"])
    pool.stop()


def test_a_late_answer_of_the_fork_server_is_not_confused_with_the_next() -> None:
    pool = ProcessPool({"does": part(timeout_s=30.0)}, num_workers=1)
    pool.fork_server._socket.settimeout(0.1)
    os.kill(pool.fork_server.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        pool.fork_server.fork()
    os.kill(pool.fork_server.pid, signal.SIGCONT)
    with pytest.raises(EngineError, match="the fork server of reward functions has died"):
        pool.fork_server.fork()
    pool.stop()


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


def test_a_function_that_only_this_process_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its module has been made by hand; where workers are forked there is no such file."""
    module = ModuleType("made_here")
    module.reward = misbehaving.reward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    with pytest.raises(EngineError, match=r"^reward 'made_here' cannot be loaded in the fork server: function: 'made"):
        ProcessPool({"made_here": RewardTerm(function="made_here:reward")})


@pytest.mark.parametrize("deaths", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_no_call_is_lost_when_workers_die(deaths: int, pool: ProcessPool) -> None:
    found = outcomes(pool, ["good", "exit", "good", "another number"] * deaths, "patient")
    assert found[::2] == [1.5] * 2 * deaths
    assert found[1::4] == [Failure("died", "ended its process (exit code 0)")] * deaths
    assert found[3::4] == [2.5] * deaths


@pytest.mark.parametrize(
    "hangs", [4, pytest.param(20, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_the_pool_is_whole_after_many_hangs(hangs: int, pool: ProcessPool) -> None:
    late = Failure("timeout", "took longer than its timeout_s of 0.02 s")
    assert outcomes(pool, ["hang"] * hangs, "brief") == [late] * hangs
    assert outcomes(pool, ["good"] * hangs, "patient") == [1.5] * hangs
    assert sorted(children(pool.fork_server.pid)) == sorted(worker.pid for worker in pool.workers)
    assert len(pool.workers) == 2


OWNER = """
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import Call
from rlflow.rewards.pool import ProcessPool

pool = ProcessPool({"does": RewardTerm(function="MODULE:reward", timeout_s=100.0)}, num_workers=1)
for call, (given,) in pool.outcomes([Call("does", [0], ["good"], [{}])]):
    print(given, flush=True)
list(pool.outcomes([Call("does", [0], ["hang on"], [{}])]))
"""


@pytest.mark.slow
def test_all_of_it_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER.replace("MODULE", MODULE)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"1.5\n"
        owner.kill()
        # Fork server and worker have its standard output, which ends with the last of them.
        assert owner.communicate(timeout=10)[0] == b""
