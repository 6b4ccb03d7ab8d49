"""The batcher and its sessions over an engine whose outputs come one step late, as vLLM's do on GPUs.

There a step is scheduled before the last one has been read (asynchronous scheduling), so ``step`` returns the outputs
of the step before, and nothing the first time. The end of a request is known only when the next step already runs.
"""

import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.engines.base import Sampling
from rlflow.engines.serving import batching
from rlflow.engines.serving.batching import Batcher, Request, Response
from rlflow.engines.vllm import VllmEngine
from rlflow.errors import EngineError
from tests.helpers import prompts, spec

PATIENCE_S = 60
# The token that ends each response. The step that runs meanwhile may add another one.
END = 0


@dataclass
class _Request:
    length: int
    """Tokens of its response, the end among them."""
    ids: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def output(self) -> Any:
        reason = "stop" if self.ids and self.ids[-1] == END else "abort"
        ids = list(self.ids)
        return SimpleNamespace(
            token_ids=ids, finish_reason=reason, logprobs=SimpleNamespace(logprobs=[-1.0] * len(ids))
        )


class LateEngine:
    """vLLM's LLMEngine with asynchronous scheduling, for prompts of n tokens with responses of n tokens."""

    def __init__(self) -> None:
        self.requests: dict[str, _Request] = {}
        self.running: list[str] | None = None
        """The requests of the step that is on its way; None where there is none."""
        self.steps = self.empty_steps = 0
        self.told: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.engine_core = SimpleNamespace(engine_core=self)
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.requests),
            requests={},
            get_request_counts=lambda: (0, 0),
            kv_cache_manager=SimpleNamespace(usage=0.0),
            _preempt_request=None,
        )

    @property
    def batch_queue(self) -> list[list[str]]:
        """Return the steps that run, as vLLM's EngineCore keeps them."""
        return [] if self.running is None else [self.running]

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, lora_request: Any) -> None:
        assert not self.told or self.told[-1] != "sleep 1"
        self.requests[name] = _Request(len(prompt["prompt_token_ids"]))

    def abort_request(self, names: Collection[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        assert self.go_on.wait(PATIENCE_S)
        self.steps += 1
        before, self.running = self.running, list(self.requests) or None
        finished = []
        for name in before or ():
            # Requests that were aborted meanwhile are skipped, as vLLM's output processor does.
            if (request := self.requests.get(name)) is not None:
                left = request.length - len(request.ids)
                request.ids.append(END if left == 1 else 1)
                if left == 1:
                    del self.requests[name]
                    finished.append(SimpleNamespace(request_id=name, outputs=[request.output], finished=True))
        self.empty_steps += not finished
        return finished

    def so_far(self, names: Collection[str]) -> list[Any]:
        return [SimpleNamespace(request_id=name, outputs=[self.requests[name].output]) for name in names]

    def _alone(self, what: str) -> None:
        assert self.running is None, f"{what} while a step is on its way"
        self.told.append(what)

    def sleep(self, level: int) -> None:
        self._alone(f"sleep {level}")

    def wake_up(self, tags: list[str] | None) -> None:
        self._alone("wake")

    def reset_prefix_cache(self) -> bool:
        self._alone("forget")
        return True

    def collective_rpc(self, method: str, args: tuple[str], kwargs: dict[str, Any]) -> list[Any]:
        self._alone(args[0])
        return [(None, None)]


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> LateEngine:
    monkeypatch.setattr(batching, "partial_outputs", LateEngine.so_far)
    return LateEngine()


@pytest.fixture
def engine(inner: LateEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """Return an engine on a stand-in for a GPU."""
    monkeypatch.setattr(VllmEngine, "__init__", lambda self, given: None)
    engine = VllmEngine(spec())
    engine._spec = replace(spec("rollout"), device="cuda:0")
    engine._batcher = Batcher("rollout", lambda: inner)
    engine._weights_asleep, engine._vision = False, None
    engine._max_model_len, engine._max_num_seqs, engine._cache_tokens = 100, 4, 1000
    engine.tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(row) for row in ids])
    monkeypatch.setattr(engine, "_sampling_params", lambda sampling, seed: None)
    return engine


def requests(*lengths: int) -> list[Request]:
    return [Request([1] * length, None) for length in lengths]


def written(answers: "list[Future[Response]]") -> list[list[int]]:
    return [answer.result(PATIENCE_S).output.token_ids for answer in answers]


def response(length: int) -> list[int]:
    return [1] * (length - 1) + [END]


def test_every_request_gets_all_of_its_tokens_once(engine: VllmEngine, inner: LateEngine) -> None:
    """Though the first step of each generation returns nothing, and the last one runs for no request."""
    for _ in range(3):
        answers = engine._batcher.submit(requests(3, 1, 7))
        assert written(answers) == [response(3), response(1), response(7)]
        assert inner.requests == {}
    assert inner.empty_steps >= 3


def test_a_step_on_its_way_ends_before_the_engine_sleeps_or_takes_weights(
    engine: VllmEngine, inner: LateEngine
) -> None:
    for version in (1, 2):
        assert written(engine._batcher.submit(requests(2, 5))) == [response(2), response(5)]
        engine.sleep()
        with pytest.raises(EngineError, match="it is asleep"):
            engine._batcher.submit(requests(2))[0].result(PATIENCE_S)
        engine.wake(True)
        engine.transfer("update_weights", {})
        engine.finish_transfer(version)
        engine.wake()
    assert engine._batcher.submit(requests(2))[0].result(PATIENCE_S).version == 2
    # The new version of the weights also waits for responses that are being generated.
    late = engine._batcher.submit(requests(30))
    engine.finish_transfer(3)
    assert (late[0].result(PATIENCE_S).version, late[0].done()) == (2, True)
    assert inner.told[:5] == ["forget", "sleep 1", "wake", "update_weights", "forget"]


def test_requests_that_are_broken_off_answer_with_what_has_been_read(engine: VllmEngine, inner: LateEngine) -> None:
    """Their tokens of the step on its way are nobody's; others go on, and the engine takes more."""
    inner.go_on.clear()
    first, other = engine._batcher.submit(requests(50, 4))
    breaking = threading.Thread(target=engine._batcher.abort, args=([first],), daemon=True)
    breaking.start()
    inner.go_on.set()
    breaking.join(PATIENCE_S)
    broken = first.result(PATIENCE_S)
    assert not broken.is_done
    assert broken.output.token_ids == [1] * broken.length
    assert broken.length < 50
    assert written([other]) == [response(4)]
    assert written(engine._batcher.submit(requests(2))) == [response(2)]


def test_sessions_tell_each_row_once(engine: VllmEngine) -> None:
    """Rows that are put off and gone on with have all of their tokens, those of before among them."""
    given, sampling = prompts((2, 9, 3, 6)), Sampling(max_tokens=40, group_size=2)
    engine.begin_session(given, sampling)
    rows = np.arange(8, dtype=np.int32)
    told: list[int] = []
    progress = engine.advance(rows[:6].tobytes(), 2)
    told += np.frombuffer(progress.rows, np.int32).tolist()
    put_off = engine.preempt(rows[2:4].tobytes())
    waiting = [] if put_off is None else [row for row in (2, 3) if row not in told]
    again = np.array([*waiting, 6, 7], np.int32)
    while len(told) < 8:
        progress = engine.advance(again.tobytes(), 8 - len(told))
        again = again[:0]
        told += np.frombuffer(progress.rows, np.int32).tolist()
        assert progress.decode_steps >= max(np.frombuffer(progress.lengths, np.int32), default=0)
    assert sorted(told) == list(range(8))
    out = engine.finish_session()
    assert out is not None
    lengths = np.repeat(given.ids.lengths, 2).tolist()
    assert [out.response_ids[row].tolist() for row in range(8)] == [response(length) for length in lengths]
    assert out.finished.all()
