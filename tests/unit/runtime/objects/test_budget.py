"""Waiting for room in an object store, and the error if there will be none."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, thread
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Logprobs, Packed, Rewards
from rlflow.errors import EngineError
from rlflow.runtime.objects import results
from rlflow.runtime.objects.budget import Budget, StoreLimit, current_edge, edge
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.results import StoreCalls
from rlflow.runtime.objects.slices import open_message
from rlflow.runtime.objects.store import Block, blocks_of

MIB = 2**20


class Holder:
    """Something that can go."""


def budget(mib: float = 10) -> Budget:
    made = Budget({"a": StoreLimit("host-0", int(mib * MIB)), "b": StoreLimit("host-1", int(mib * MIB))})
    made.begin_call()  # a call that goes on for ever
    return made


class TestBudget:
    def test_room_is_granted_in_the_order_of_requests(self) -> None:
        of = budget()
        for _ in range(3):
            of.begin_call()
        asked = [of.reserve("a", size * MIB, "x") for size in (6, 6, 1)]
        other = of.reserve("b", 10 * MIB, "x")
        assert [call.done() for call in (*asked, other)] == [True, False, False, True]
        of.release("a", 6 * MIB, "x")
        assert all(call.done() and call.exception() is None for call in asked)
        assert of.used == {"host-0": 7 * MIB, "host-1": 10 * MIB}
        assert of.peaks == {"host-0": 7 * MIB, "host-1": 10 * MIB}

    def test_it_goes_with_what_holds_it(self) -> None:
        of = budget()
        of.reserve("a", 8 * MIB, "x")
        holder: Any = Holder()
        of.release_with(holder, "a", 8 * MIB, "x")
        of.begin_call()
        waiting = of.reserve("a", 8 * MIB, "y")
        assert not waiting.done()
        holder.itself = holder  # only the collector can see that it has gone
        del holder
        of.end_call()
        assert waiting.result(timeout=0) is None
        assert of.drain_edge_bytes() == {"x": 8 * MIB, "y": 8 * MIB}
        assert of.drain_edge_bytes() == {}

    def test_what_is_generated_ahead_waits_for_the_step_that_trains(self) -> None:
        """No running call can free room, but the step that trains will, except for its own edges."""
        of = budget()
        of.expect_release(["rollouts"])
        of.reserve("a", 8 * MIB, "rollouts")
        of.begin_call()
        ahead = of.reserve("a", 4 * MIB, "rollouts")
        own = of.reserve("a", 4 * MIB, "reference")
        assert (ahead.done(), own.done()) == (False, True)
        with pytest.raises(EngineError, match="no running call will free any"):
            own.result(0)
        of.release("a", 8 * MIB, "rollouts")
        assert ahead.result(0) is None

    def test_without_a_step_that_trains_waiting_ahead_is_an_error(self) -> None:
        of = budget()
        of.expect_release(["rollouts"])
        of.reserve("a", 8 * MIB, "rollouts")
        waiting = of.reserve("a", 4 * MIB, "rollouts")
        assert not waiting.done()
        of.expect_release(())
        assert isinstance(waiting.exception(0), EngineError)

    def test_when_nothing_runs_that_could_give_back_it_is_an_error(self) -> None:
        of = budget()
        of.reserve("a", 7 * MIB, "rollouts")
        of.reserve("a", 1 * MIB, "prompts")
        of.begin_call()
        waiting = of.reserve("a", 3 * MIB, "reference")
        assert not waiting.done()
        of.end_call()
        said = (
            r"object store of host-0: reference needs 3\.0 MiB of the 10\.0 MiB for batches, and no running call will"
            r" free any\. In use: rollouts 7\.0 MiB, prompts 1\.0 MiB\. Fix: a larger --object-store-memory"
        )
        with pytest.raises(EngineError, match=said):
            waiting.result(timeout=0)
        of.release("a", 7 * MIB, "rollouts")
        assert of.reserve("a", 3 * MIB, "reference").done(), "it goes on when there is room again"

    def test_more_than_all_of_it_never_fits(self) -> None:
        of = budget()
        of.begin_call()
        with pytest.raises(EngineError, match=r"needs 11\.0 MiB of the 10\.0 MiB"):
            of.reserve("a", 11 * MIB, "x").result(timeout=0)

    def test_many_threads_lose_nothing(self) -> None:
        of, count = budget(1), 400
        answers: list[Future[None]] = []

        def go(asked: "Future[None]") -> None:
            of.release_with(Holder(), "a", MIB // 4, "x")
            of.end_call()

        def take(number: int) -> None:
            of.begin_call()
            asked = of.reserve("a", MIB // 4, "x")
            answers.append(asked)
            asked.add_done_callback(go)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(take, range(count)))
        assert [answer.exception(timeout=20) for answer in answers] == [None] * count
        assert of.used == {"host-0": 0, "host-1": 0}
        assert 0 < of.peaks["host-0"] <= MIB


def test_an_edge_is_named_within_its_context() -> None:
    with edge("rollouts"):
        assert current_edge() == "rollouts"
    assert current_edge() == "other"


class Engine:
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.began = threading.Event()

    def make(self, mib: float) -> Logprobs:
        return Logprobs(values=Packed.from_rows([np.zeros(int(mib * MIB) // 4, np.float32)], np.float32))

    def judge(self, made: Logprobs, *, add: float = 0) -> Rewards:
        return Rewards(values=np.full(1, made.values.lengths.sum() + add, np.float32))

    def wait(self, made: Any) -> None:
        self.began.set()
        assert self.go_on.wait(20)

    def fail(self) -> None:
        raise EngineError("it fails.")


class Threads:
    """Workers on two hosts, and calls of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
        objects: dict[int, Any] = {}
        self.pool = ThreadPoolExecutor(8)
        self.engine = Engine()
        self.keeper = ObjectProcess()
        self.keeper._object = self.engine
        self.store_calls = StoreCalls(Budget({"a": StoreLimit("host-0", int(mib * MIB))}))
        monkeypatch.setattr(results, "this_host", lambda: "a")
        monkeypatch.setattr(results, "put_array", lambda values: self.put(objects, values))
        self.refuse = False

    def put(self, objects: dict[int, Any], values: Any) -> Block:
        if self.refuse:
            raise EngineError("the disk is gone.")
        objects[len(objects)] = values
        return Block(len(objects) - 1, "a", len(values), values.dtype.str)

    def remote(self, method: str, *arguments: Any, **named: Any) -> "Future[Any]":
        return self.pool.submit(getattr(self.keeper, method), *map(open_message, arguments), **named)

    def call(self, method: str, *arguments: Any, **options: Any) -> "Future[Any]":
        return self.store_calls.call(self.remote, method, *arguments, **options)


class TestHandover:
    @pytest.fixture
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        threads = Threads(monkeypatch, mib=10)
        with threads.store_calls.running():
            yield threads
        threads.engine.go_on.set()
        threads.pool.shutdown()

    def test_a_result_stays_in_the_store_while_it_is_referenced(self, threads: Threads) -> None:
        with edge("prompts"):
            made = threads.call("make", 4).result(timeout=20)
        assert [block.nbytes for block in blocks_of(made)] == [4 * MIB]
        assert threads.store_calls.budget.used["host-0"] == 4 * MIB
        assert threads.store_calls.budget.drain_edge_bytes() == {"prompts": 4 * MIB}
        part = made.take(np.array([0]))
        del made
        assert threads.store_calls.budget.used["host-0"] == 4 * MIB
        assert threads.call("judge", part, named={"add": 1}).result(timeout=20).values.tolist() == [MIB + 1]
        del part
        assert threads.store_calls.budget.used["host-0"] == 0

    def test_a_result_that_is_not_wanted_takes_no_room(self, threads: Threads) -> None:
        assert threads.call("make", 40, wanted=False).result(timeout=20) is None
        assert threads.store_calls.budget.peaks["host-0"] == 0

    def test_a_producer_waits_until_a_reader_makes_room(self, threads: Threads) -> None:
        """The reader's call alone holds what is in the way."""
        made = threads.call("make", 8).result(timeout=20)
        reading = threads.call("wait", made)
        assert threads.engine.began.wait(20)
        del made
        more = threads.call("make", 8)
        with pytest.raises(TimeoutError):
            more.result(timeout=0.2)
        threads.engine.go_on.set()
        reading.result(timeout=20)
        del reading
        assert len(more.result(timeout=20)) == 1
        assert threads.store_calls.budget.peaks["host-0"] == 8 * MIB

    @pytest.mark.timeout(60)
    def test_room_may_become_free_while_an_executor_is_given_a_call(self, threads: Threads) -> None:
        """The garbage collector may run in ``submit``, which has a lock of the whole process."""
        made = threads.call("make", 8).result(timeout=20)
        threads.store_calls.budget.begin_call()
        more = threads.call("make", 8)
        with pytest.raises(TimeoutError):
            more.result(timeout=0.2)
        with thread._global_shutdown_lock:
            del made
        assert len(more.result(timeout=20)) == 1

    def test_calls_fail_when_the_run_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = Threads(monkeypatch, mib=10)
        with threads.store_calls.running():
            waiting = threads.call("wait", None)
            assert threads.engine.began.wait(20)
        threads.engine.go_on.set()
        with pytest.raises(EngineError, match="the run has ended"):
            waiting.result(timeout=20)
        threads.pool.shutdown()

    def test_a_full_store_is_an_error_without_losses(self, threads: Threads) -> None:
        made = threads.call("make", 8).result(timeout=20)
        with pytest.raises(EngineError, match=r"object store of host-0: other needs 8\.0 MiB"):
            threads.call("make", 8).result(timeout=20)
        assert threads.call("judge", made).result(timeout=20).values.tolist() == [2 * MIB]
        del made
        assert len(threads.call("make", 8).result(timeout=20)) == 1

    def test_what_fails_gives_its_room_back(self, threads: Threads) -> None:
        with pytest.raises(EngineError, match="it fails"):
            threads.call("fail").result(timeout=20)
        threads.refuse = True
        with pytest.raises(EngineError, match="the disk is gone"):
            threads.call("make", 8).result(timeout=20)
        threads.refuse = False
        assert len(threads.call("make", 8).result(timeout=20)) == 1

    def test_results_of_many_calls_are_put_as_one(self, threads: Threads) -> None:
        ticket = threads.store_calls.new_ticket()
        answers = [threads.store_calls.hold(threads.remote, ticket, "make", 1).result(timeout=20) for _ in range(3)]
        assert threads.store_calls.budget.used["host-0"] == 0
        nbytes = sum(answer.nbytes for answer in answers)
        made = threads.store_calls.put(threads.remote, ticket, "a", nbytes).result(timeout=20)
        assert len(made) == 3
        assert threads.store_calls.budget.used["host-0"] == nbytes
        assert len(made.values.blocks) == 1
