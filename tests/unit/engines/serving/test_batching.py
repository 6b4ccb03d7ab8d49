"""The thread that owns vLLM's engine, and the engine's sleep, without vLLM."""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.batching import Batcher, Request, Response
from rlflow.engines.vllm import VllmEngine
from rlflow.errors import EngineError
from tests.helpers import spec


@dataclass
class Output:
    request_id: str
    outputs: list[Any]
    finished: bool = True


class FakeEngine:
    """Answers a prompt of n tokens after n steps, and loses ``num_losses`` requests with the parameters "lost"."""

    def __init__(self) -> None:
        self.num_losses = 0
        self.live: dict[str, int] = {}
        self.most = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.steps = 0
        self.threads: set[int] = set()

    def add_request(self, name: str, prompt: dict[str, list[int]], params: str, lora_request: object) -> None:
        if params == "bad":
            raise ValueError("no such parameter")
        if params == "lost" and self.num_losses:
            self.num_losses -= 1
            return
        self.live[name] = len(prompt["prompt_token_ids"])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.live.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Output]:
        self.steps += 1
        assert self.go_on.wait(60)
        self.threads.add(threading.get_ident())
        self.most = max(self.most, len(self.live))
        self.live = {name: left - 1 for name, left in self.live.items()}
        done = [name for name, left in self.live.items() if left == 0]
        return [Output(name, [SimpleNamespace(token_ids=[self.live.pop(name)])]) for name in done]


def requests(*lengths: int, params: str = "") -> list[Request]:
    return [Request([0] * length, params) for length in lengths]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def batcher(engine: FakeEngine) -> Batcher:
    return Batcher("rollout", lambda: engine)


def started(function: Callable[..., Any], *arguments: Any) -> "tuple[threading.Thread, list[Any]]":
    """Start a function in a thread that adds its result or error to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except EngineError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def wait_for(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(6000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it does not come about")


def generate(batcher: Batcher, given: list[Request]) -> list[Response]:
    return [answer.result(timeout=60) for answer in batcher.submit(given)]


def waiting(batcher: Batcher) -> int:
    return batcher._inbox.qsize() + (batcher._next is not None)


class TestBatcher:
    def test_all_callers_are_worked_on_together(self, engine: FakeEngine, batcher: Batcher) -> None:
        engine.go_on.clear()
        callers = [started(generate, batcher, requests(3, 2, 2)) for _ in range(4)]
        wait_for(lambda: len(engine.live) + batcher._inbox.qsize() * 3 == 12)
        engine.go_on.set()
        for thread, results in callers:
            thread.join(60)
            assert [len(written) for written in results] == [3]
        assert engine.most == 12
        assert engine.threads.isdisjoint({threading.get_ident()})

    def test_abort_completes_the_named_requests(
        self, engine: FakeEngine, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def so_far(of: FakeEngine, names: Collection[str]) -> list[Output]:
            return [Output(name, [SimpleNamespace(token_ids=[1] * of.live[name])]) for name in names]

        monkeypatch.setattr("rlflow.engines.serving.batching.partial_outputs", so_far)
        batcher.abort([])
        engine.go_on.clear()
        begun = PartialResponse(np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
        first = batcher.submit([Request([0] * 9, "", begun), Request([0] * 3, "")])
        wait_for(lambda: engine.steps == 1)
        later = batcher.submit(requests(7))
        thread, results = started(batcher.abort, [first[0], *later])
        wait_for(lambda: waiting(batcher) == 2)
        engine.go_on.set()
        thread.join(60)
        assert results == [None]
        assert [answer.result(60).length for answer in [first[0], *later]] == [2 + 8, 7]
        assert not first[1].done() or first[1].result().length == 1
        assert [written.length for written in generate(batcher, requests(2))] == [1], "it goes on with what comes"

    def test_a_call_has_the_engine_for_itself(self, engine: FakeEngine, batcher: Batcher) -> None:
        engine.go_on.clear()
        before, first = started(generate, batcher, requests(5))
        wait_for(lambda: engine.steps == 1)

        def change(given: FakeEngine) -> int:
            assert given is engine
            batcher.version = 1
            return len(engine.live)

        call, live = started(batcher.call, change)
        wait_for(lambda: waiting(batcher) == 1)
        after, second = started(generate, batcher, requests(5))
        wait_for(lambda: waiting(batcher) == 2)
        engine.go_on.set()
        for thread in (before, call, after):
            thread.join(60)
        assert live == [0]
        assert [written.version for (written,) in first + second] == [0, 1]

    def test_nothing_is_generated_from_incomplete_weights(self, batcher: Batcher) -> None:
        def fail(_: FakeEngine) -> None:
            batcher.version = None
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            batcher.call(fail)
        with pytest.raises(EngineError, match="role rollout: it cannot generate: its weights are incomplete"):
            generate(batcher, requests(1))

    def test_an_engine_that_fails_fails_everybody(self, engine: FakeEngine, batcher: Batcher) -> None:
        engine.go_on.clear()
        callers = [started(generate, batcher, requests(1)) for _ in range(3)]
        wait_for(lambda: len(engine.live) + batcher._inbox.qsize() == 3)
        engine.step = lambda: 1 / 0  # type: ignore[assignment,return-value]
        engine.go_on.set()
        for thread, results in [*callers, started(generate, batcher, requests(9))]:
            thread.join(60)
            assert len(results) == 1
        assert isinstance(results[0], EngineError)
        with pytest.raises(EngineError, match=r"role rollout: vLLM stopped \(ZeroDivisionError: division by zero\)"):
            batcher.call(lambda _: None)

    def test_a_request_that_is_refused_fails_its_group_alone(self, engine: FakeEngine, batcher: Batcher) -> None:
        engine.go_on.clear()
        other, results = started(generate, batcher, requests(3, 2))
        wait_for(lambda: engine.steps == 1)
        bad, errors = started(generate, batcher, [*requests(5, 5), *requests(1, params="bad")])
        wait_for(lambda: waiting(batcher) == 1)
        engine.go_on.set()
        for thread in (other, bad):
            thread.join(60)
        assert [str(error) for error in errors] == [
            "role rollout: vLLM refuses a request (ValueError: no such parameter)."
        ]
        assert [written.output.token_ids for written in results[0]] == [[0], [0]]
        assert engine.live == {}
        assert len(generate(batcher, requests(1))) == 1

    @pytest.mark.parametrize("losses", [1, 2, 5])
    def test_requests_that_vllm_has_lost_are_submitted_again(
        self, losses: int, engine: FakeEngine, batcher: Batcher
    ) -> None:
        engine.num_losses = losses
        done = generate(batcher, [*requests(4), *requests(3, 2, params="lost"), *requests(7)])
        assert [each.length for each in done] == [1] * 4
        assert engine.num_losses == 0
        assert engine.live == {}

    def test_a_request_that_is_lost_every_time_fails(self, engine: FakeEngine, batcher: Batcher) -> None:
        engine.num_losses = 1000
        with pytest.raises(EngineError, match="role rollout: vLLM has lost 1 of 2 requests 4 times"):
            generate(batcher, [*requests(3, params="lost"), *requests(2)])
        assert engine.num_losses == 1000 - 4
        assert len(generate(batcher, requests(1))) == 1, "others are generated"

    def test_what_does_not_start_says_so(self) -> None:
        with pytest.raises(ZeroDivisionError):
            Batcher("rollout", lambda: 1 / 0)

    def test_nothing_asked_is_answered(self, batcher: Batcher) -> None:
        assert generate(batcher, []) == []


class SleepingEngine(FakeEngine):
    """Writes down what it is told of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None) -> None:
        self.told.append(tags)

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(self, method: str, args: tuple[str], kwargs: dict[str, Any]) -> list[Any]:
        assert method == "attempt"
        self.told.append(args[0])
        return [(None, None)]


class TestSleeps:
    @pytest.fixture
    def inner(self) -> SleepingEngine:
        return SleepingEngine()

    @pytest.fixture
    def engine(self, inner: SleepingEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
        """Return an engine that takes its device for a GPU."""
        monkeypatch.setattr(VllmEngine, "__init__", lambda self, spec: None)
        engine = VllmEngine(spec())
        engine._vision = None
        engine._spec = replace(spec("rollout"), device="cuda:0")
        engine._batcher = Batcher("rollout", lambda: inner)
        engine._weights_asleep = False
        return engine

    def test_weights_come_before_there_is_room_for_keys_and_values(
        self, engine: VllmEngine, inner: SleepingEngine
    ) -> None:
        engine.sleep()
        with pytest.raises(EngineError, match="role rollout: it cannot load weights: it is asleep"):
            engine.transfer("update_weights", {})
        for _ in range(2):
            engine.wake(True)
        with pytest.raises(EngineError, match="role rollout: it cannot generate: it is asleep"):
            generate(engine._batcher, requests(1))
        engine.transfer("update_weights", {})
        engine.finish_transfer(3)
        engine.wake()
        engine.wake()
        assert generate(engine._batcher, requests(1))[0].version == 3
        assert inner.told == ["sleep 1", ["weights"], "update_weights", None]

    def test_it_falls_asleep_again_before_it_was_quite_awake(self, engine: VllmEngine, inner: SleepingEngine) -> None:
        engine.sleep()
        engine.wake(True)
        engine.sleep()
        engine.sleep()
        engine.wake()
        assert inner.told == ["sleep 1", ["weights"], "sleep 1", None]
        assert generate(engine._batcher, requests(1))[0].version == 0

    def test_weights_that_a_sync_replaces_are_discarded(self, engine: VllmEngine, inner: SleepingEngine) -> None:
        engine.sleep(discard_weights=True)
        engine.wake()
        with pytest.raises(EngineError, match="role rollout: it cannot generate: its weights are incomplete"):
            generate(engine._batcher, requests(1))
        engine.sleep(discard_weights=True)
        engine.wake(True)
        engine.transfer("update_weights", {})
        engine.finish_transfer(4)
        engine.wake()
        assert generate(engine._batcher, requests(1))[0].version == 4
        assert inner.told == ["sleep 2", None, "sleep 2", ["weights"], "update_weights", None]
