"""The parts of the vLLM engine, without vLLM."""

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.activity import ActivityRecorder
from rlflow.engines.serving.batching import Batcher, Request, Response
from rlflow.engines.serving.settings import (
    check_model,
    engine_arguments,
    load_config,
    load_end_ids,
    model_files,
    set_environment,
)
from rlflow.engines.serving.weights import (
    ExpectedWeights,
    SharedFile,
    write_shared_files,
)
from rlflow.engines.vllm import VllmEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora
from tests.helpers import ARCHITECTURE, CHARACTERS, MODEL, spec


@dataclass
class Output:
    request_id: str
    outputs: list[Any]
    finished: bool = True


class FakeEngine:
    """Answers a prompt of n tokens after n steps."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.most = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.steps = 0
        self.threads: set[int] = set()

    def add_request(self, name: str, prompt: dict[str, list[int]], params: str, lora_request: object) -> None:
        if params == "bad":
            raise ValueError("no such parameter")
        self.live[name] = len(prompt["prompt_token_ids"])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.live.pop(name, None)

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
    """In a thread; its result or error comes into the list."""
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

    def test_breaking_off_answers_those_that_are_named(
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

    def test_nothing_is_generated_from_weights_that_are_not_whole(self, batcher: Batcher) -> None:
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
        """As on a GPU."""
        monkeypatch.setattr(VllmEngine, "__init__", lambda self, spec: None)
        engine = VllmEngine(spec())
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

    def test_weights_that_a_copy_replaces_are_not_kept(self, engine: VllmEngine, inner: SleepingEngine) -> None:
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


class TestSharedFiles:
    def test_what_went_in_comes_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.engines.serving.weights._FILE_BYTES", 300)
        given = [
            ("a", torch.arange(6.0).view(2, 3)),
            ("b", torch.arange(5).to(torch.bfloat16)),
            ("large", torch.arange(200.0)),
            ("scalar", torch.tensor(3.0)),
            ("transposed", torch.arange(6.0).view(2, 3).T),
        ]
        paths: list[str] = []
        found: list[tuple[str, torch.Tensor]] = []
        for file in write_shared_files(iter(given)):
            assert isinstance(file, SharedFile)
            assert os.path.exists(file.path)
            paths.append(file.path)
            found += file.tensors()
        assert len(paths) == 3
        assert not any(map(os.path.exists, paths))
        assert [name for name, _ in found] == [name for name, _ in given]
        for (_, tensor), (_, same) in zip(given, found, strict=True):
            assert tensor.dtype == same.dtype
            assert torch.equal(tensor, same)

    def test_a_stream_that_breaks_off_leaves_no_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.engines.serving.weights._FILE_BYTES", 8)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(4)
            yield "b", torch.zeros(4)
            raise OSError("gone")

        files = write_shared_files(stream())
        path = next(files).path
        with pytest.raises(OSError, match="gone"):
            next(files)
        assert not os.path.exists(path)


class TestModelFiles:
    def test_a_new_model_is_the_one_of_the_other_engines(self) -> None:
        with model_files(spec(seed=3)) as folder:
            config = load_config("policy", folder)
            again = replace(MODEL, path=folder, random_weights=False)
            read = load_model("policy", again, device="cpu", dtype=torch.float32, seed=0).state_dict()
            assert load_end_ids(folder, config) == [0]
        assert not Path(folder).exists()
        new = load_model("policy", MODEL, device="cpu", dtype=torch.float32, seed=3).state_dict()
        assert new.keys() == read.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in new.items())

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"models\.policy\.path: .*cannot be loaded"):
            load_config("policy", str(tmp_path))

    @pytest.mark.parametrize("tied", [False, True])
    def test_weights_are_held_against_the_model(self, tied: bool) -> None:
        model = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=tied))
        with model_files(spec(model=model)) as folder:
            expected = ExpectedWeights.of(load_config("policy", folder), spec())
        weights = {name: torch.zeros(shape) for name, shape in expected.shapes.items()}
        assert dict(expected.check("rollout", weights.items())).keys() == weights.keys()
        head = weights.pop("lm_head.weight")
        if tied:
            assert len(list(expected.check("rollout", weights.items()))) == len(weights)
        else:
            with pytest.raises(EngineError, match=r"role rollout: the weights lack 'lm_head\.weight'"):
                list(expected.check("rollout", weights.items()))
        for wrong in ({"lm_head.weight": head[:1]}, {"another": head}):
            with pytest.raises(EngineError, match=f"the weight '{next(iter(wrong))}' does not fit the model"):
                list(expected.check("rollout", (weights | wrong).items()))


def config(**values: Any) -> SimpleNamespace:
    usual = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
    return SimpleNamespace(**(usual | {"hidden_size": 512, "max_position_embeddings": 4096} | values))


class TestSettings:
    def test_a_head_that_no_kernel_takes(self) -> None:
        with pytest.raises(
            RecipeError, match=r"models\.policy: vLLM on the CPU has no attention kernel for head_dim 8\."
        ):
            check_model(spec(), config(head_dim=8))
        check_model(replace(spec(), device="cuda:0"), config(head_dim=8))
        check_model(spec(), config(head_dim=None))

    def test_heads_that_cannot_be_shared_out(self) -> None:
        three = replace(spec("rollout"), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=3))
        with pytest.raises(RecipeError, match=r"roles\.rollout\.tensor_parallel_size: 3 does not divide the 8"):
            check_model(three, config())

    def test_on_the_cpu_the_cache_holds_all_that_is_written_at_once(self) -> None:
        given = engine_arguments(replace(spec(), max_num_seqs=8, max_model_len=100), "folder", config())
        blocks = (8 + 1) * (4 + 1)
        assert given["kv_cache_memory_bytes"] == blocks * 32 * 2 * 2 * 4 * 64 * 4
        assert (given["max_model_len"], given["max_num_seqs"]) == (100, 8)
        assert given["enforce_eager"]
        assert given["distributed_executor_backend"] == "uni"

    def test_only_layers_with_adapters_have_room_for_them(self) -> None:
        given = replace(spec(), lora=Lora(rank=4, target_modules=("v_proj", "q_proj")))
        with model_files(given) as folder:
            adapted = ExpectedWeights.of(load_config("policy", folder), given).adapted_layers
        arguments = engine_arguments(given, "folder", config(), adapted)
        assert (arguments["lora_target_modules"], arguments["max_lora_rank"]) == (["q_proj", "v_proj"], 8)

    def test_on_gpus_it_is_as_planned(self) -> None:
        layout = Layout(micro_batch_tokens=1, tensor_parallel_size=2, gpu_memory_utilization=0.6, sleeps=True)
        given = engine_arguments(
            replace(spec(), device="cuda:0", layout=layout, max_model_len=None), "folder", config()
        )
        assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")
        assert (given["gpu_memory_utilization"], given["enable_sleep_mode"]) == (0.6, True)
        assert given["max_model_len"] == 4096
        assert given["max_num_batched_tokens"] == 8192
        assert "kv_cache_memory_bytes" not in given

    @pytest.mark.parametrize("eager", [True, False])
    def test_graphs_are_as_planned(self, eager: bool) -> None:
        layout = Layout(micro_batch_tokens=1, eager=eager)
        given = engine_arguments(replace(spec(), device="cuda:0", layout=layout), "folder", config())
        assert given["enforce_eager"] == eager

    def test_ranks_have_cores_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", environment := dict[str, str]())
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
        set_environment(replace(spec(), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=2)))
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        with pytest.raises(RecipeError, match="needs a core for each of 2 ranks, but there are 1 cores"):
            set_environment(replace(spec(), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=2)))


def test_the_model_of_these_tests_has_heads_that_vllm_takes() -> None:
    assert ARCHITECTURE.head_dim == 32
    assert len(CHARACTERS) + 1 == ARCHITECTURE.vocab_size


class DriverError(Exception):
    pass


def driver(*, fails: bool) -> ModuleType:
    """In place of pynvml, for a host of three GPUs that compute 10, 20 and 60 % of the time."""

    def rates(handle: int) -> SimpleNamespace:
        if fails:
            raise DriverError
        return SimpleNamespace(gpu=[10, 20, 60][handle])

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=DriverError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID={"GPU-c": 2}.__getitem__,
        nvmlDeviceGetUtilizationRates=rates,
    )
    return module


@pytest.mark.parametrize(
    ("device", "visible", "fails", "share"),
    [
        ("cuda", "1", False, 0.2),
        ("cuda", "0,GPU-c", False, 0.35),
        ("cuda", "1", True, None),
        ("cpu", "1", False, None),
    ],
)
def test_how_much_gpus_compute(
    device: str, visible: str, fails: bool, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("third_party")
    vars(package)["pynvml"] = driver(fails=fails)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.third_party", package)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    recorder = ActivityRecorder(SimpleNamespace(vllm_config=config))
    recorder.record_step([], idle=True)
    assert [second.gpu for second in recorder.take()] == [pytest.approx(share) if share else None]
