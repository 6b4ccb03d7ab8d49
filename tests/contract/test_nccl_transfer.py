"""vLLM's own engines for copies from GPU to GPU by NCCL, with gloo in the place of NCCL alone.

Two ranks of a trainer send to two vLLM engines of tensor parallel size 2: a group of rank 0 of the trainer and four
receivers. All ranks are threads of this process; the code between ``sender`` and a model's ``load_weights`` is real.
"""

import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlflow.engines.journal import Journal
from rlflow.engines.serving.batching import Batcher
from rlflow.engines.serving.vllm_worker import WorkerExtension
from rlflow.engines.vllm import VllmEngine
from rlflow.errors import EngineError
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.weights.gpu import Receivers, WeightSource, _nccl_sender
from tests.contract.gpu_stand_ins import Actor, Gloo, at_once, results, without_gpus
from tests.helpers import spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # vLLM only warns of a tensor that is larger than a bucket, and sends it in one of its own.
    pytest.mark.filterwarnings("ignore:Tensor '.*' has size"),
]
WIDTH, ENGINES = 2, 2
# Buckets are this large, so that there are several: one tensor is larger than a bucket.
BUCKET = 4096


def given(version: int) -> dict[str, Tensor]:
    """Return weights of several types and sizes, which differ between versions."""
    draw = torch.Generator().manual_seed(version)
    shapes = {"embed": (100, 16), "q": (16, 16), "norm": (16,), "scale": (), "down": (48, 16), "head": (100, 16)}
    made = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return made | {name: made[name].to(torch.bfloat16) for name in ("q", "down", "norm")}


class Trainer:
    """A rank of a trainer, which meets the other rank for each of its weights, as in a gather."""

    def __init__(self, rank: int, meeting: threading.Barrier) -> None:
        self._rank, self._meeting = rank, meeting
        self.version = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in given(self.version).items():
            self._meeting.wait(60)
            # Only rank 0 has complete weights.
            yield name, tensor if self._rank == 0 else torch.full_like(tensor, torch.nan)


class Model(nn.Module):
    """Keeps what vLLM loads into it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}
        self.order: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()
            self.order.append(name)


def vllm_worker(rank: int) -> Any:
    """Return vLLM's worker with all that copies need: its own methods, and its own engine for NCCL."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    class Extended(WorkerExtension, Worker):  # type: ignore[misc]
        pass

    worker = object.__new__(Extended)
    worker.rank, worker.model = rank, Model()
    parallel = SimpleNamespace(world_size=WIDTH, rank=rank, data_parallel_index=0)
    worker.vllm_config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(dtype=torch.float32, quantization=None),
        weight_transfer_config=WeightTransferConfig(backend="nccl"),
        compilation_config=SimpleNamespace(),
    )
    worker.model_runner = SimpleNamespace(get_model=lambda: worker.model, reset_lora_state=lambda: None)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        worker.vllm_config.weight_transfer_config, worker.vllm_config, torch.device("cpu"), worker.model
    )
    worker._weight_update_active = worker._weight_update_is_draft = False
    return worker


class LlmEngine:
    """A stand-in for vLLM's LLMEngine. It calls all its workers at once, as vLLM's executor of several processes does.

    A worker that fails ends the reading of answers, and leaves those of later ranks to the next call.
    """

    def __init__(self) -> None:
        self.workers = [vllm_worker(rank) for rank in range(WIDTH)]
        self.answers: list[SimpleQueue[Future[Any]]] = [SimpleQueue() for _ in self.workers]
        self._threads = ThreadPoolExecutor(WIDTH)

    def collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        for worker, answers in zip(self.workers, self.answers, strict=True):
            answers.put(self._threads.submit(getattr(worker, method), *args, **kwargs))
        return [answers.get().result(60) for answers in self.answers]

    def has_unfinished_requests(self) -> bool:
        return False

    def reset_prefix_cache(self) -> bool:
        return True


class RolloutWorker(EngineWorker):
    """rlflow's process of a vLLM engine."""

    inner: LlmEngine


def rollout_engine(patch: pytest.MonkeyPatch) -> RolloutWorker:
    patch.setattr(VllmEngine, "__init__", lambda self, given: None)
    engine = VllmEngine(spec())
    engine._spec = replace(spec("rollout"), device="cuda:0")
    engine._weights_asleep, engine._vision = False, None
    engine.journal = Journal(None, "rollout")
    inner = LlmEngine()
    engine._batcher = Batcher("rollout", lambda: inner)
    worker = RolloutWorker()
    worker._engine, worker._engine_thread, worker.inner = engine, None, inner
    return worker


class Setting:
    """A trainer of two ranks and what it sends to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        meeting = threading.Barrier(2)
        self.trainer = [EngineWorker() for _ in range(2)]
        for rank, worker in enumerate(self.trainer):
            worker._engine, worker._engine_thread = Trainer(rank, meeting), None
        self.engines = [rollout_engine(patch) for _ in range(ENGINES)]

    def copy(self, version: int) -> None:
        """Send the weights as ``sync.directly`` does."""
        receivers = Receivers([Actor(engine) for engine in self.engines], WIDTH)
        for worker in self.trainer:
            worker._engine.version = version
        at_once(*(partial(w.send_gpu_to_gpu, "nccl", receivers, r, "127.0.0.1") for r, w in enumerate(self.trainer)))
        for engine in self.engines:
            engine.call("finish_transfer", version)

    def replace_engine(self, index: int) -> None:
        self.engines[index] = rollout_engine(self._patch)
        for worker in self.trainer:
            worker.disconnect_receivers()

    @property
    def workers(self) -> list[Any]:
        """Return vLLM's workers of all engines, by rank."""
        return [worker for engine in self.engines for worker in engine.inner.workers]

    @property
    def models(self) -> list[Model]:
        """Return the models of all workers."""
        return [worker.model for worker in self.workers]

    def check(self, version: int) -> None:
        expected = given(version)
        for model in self.models:
            assert model.order[-len(expected) :] == list(expected), "in the order of the trainer"
            for name, tensor in expected.items():
                assert model.loaded[name].dtype == tensor.dtype
                assert model.loaded[name].shape == tensor.shape
                assert torch.equal(model.loaded[name], tensor), name
        assert [engine._engine._batcher.version for engine in self.engines] == [version] * ENGINES


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    monkeypatch.setitem(NCCLTrainerWeightTransferEngine.__init__.__kwdefaults__, "packed_buffer_size_bytes", BUCKET)
    monkeypatch.setattr("ray.get", results)
    with without_gpus(monkeypatch):
        yield Setting(monkeypatch)


def test_all_receivers_end_with_the_weights_of_rank_0(setting: Setting) -> None:
    """One group of five ranks, each once; buckets in the same order and of the same sizes on all of them."""
    for version in (1, 2):
        setting.copy(version)
        setting.check(version)
    assert sorted((each.rank, each.world_size) for each in Gloo.made) == [(rank, 5) for rank in range(5)]
    groups = [each.weight_transfer_engine.model_update_group for each in setting.workers]
    assert [each.rank for each in groups] == [1, 2, 3, 4], "engine by engine"
    sender, *receivers = sorted(Gloo.made, key=lambda each: each.rank)
    # A bucket ends with the tensor that makes it larger than BUCKET: the embedding, then all up to the head.
    sizes = {name: tensor.nbytes for name, tensor in given(1).items()}
    buckets = [sizes["embed"], sum(sizes.values()) - sizes["embed"]]
    assert sender.sent == buckets * 2
    assert all(each.sent == sender.sent for each in receivers)


def test_an_engine_that_is_replaced_meets_those_that_go_on(setting: Setting) -> None:
    setting.copy(1)
    going_on = setting.models[:WIDTH]
    setting.replace_engine(1)
    setting.copy(2)
    setting.check(2)
    assert setting.models[:WIDTH] == going_on
    before, after = Gloo.made[:5], Gloo.made[5:]
    assert sorted(each.rank for each in after) == list(range(5))
    # The process of the replaced engine, ranks 3 and 4, has ended and left nothing to close.
    assert {each.rank: each.is_open for each in before} == {0: False, 1: False, 2: False, 3: True, 4: True}


def test_a_failed_rank_leaves_no_answer_behind(setting: Setting) -> None:
    """The error of one rank is raised, and the next call gets answers of its own."""
    setting.copy(1)
    inner = setting.engines[0].inner
    worker = inner.workers[0]
    load = worker.model.load_weights

    def fail_at_the_end(weights: list[tuple[str, Tensor]]) -> None:
        # Before, it would leave the other ranks waiting in the next broadcast.
        load(weights)
        if weights[-1][0] == "head":
            raise ValueError("no such layer")

    worker.model.load_weights = fail_at_the_end
    with pytest.raises(Exception, match="no such layer"):
        setting.copy(2)
    assert all(answers.empty() for answers in inner.answers)
    with pytest.raises(EngineError, match="its weights are incomplete"):
        setting.engines[0]._engine._batcher.submit([SimpleNamespace()])[0].result(60)


def test_the_port_is_open_before_anybody_is_told_of_it(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that would take it finds it taken."""
    tell = Receivers.init_weight_transfer_engine

    def raced(receivers: Receivers, info: dict[str, Any]) -> None:
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server((info["master_address"], info["master_port"]))
        tell(receivers, info)

    monkeypatch.setattr(Receivers, "init_weight_transfer_engine", raced)
    setting.copy(1)
    setting.check(1)


def test_the_senders_are_those_of_vllm_itself(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """rlflow opens the port and vLLM's ``trainer_init`` does the rest: receivers are told the same by both."""
    told: list[dict[str, Any]] = []

    from torch._C._distributed_c10d import HashStore

    class StopError(Exception):
        pass

    def tell(receivers: Receivers, info: dict[str, Any]) -> None:
        told.append(info)
        raise StopError

    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    alone = SimpleNamespace(rank=0, world_size=1, store=HashStore())
    monkeypatch.setattr(StatelessProcessGroup, "create", lambda *given, **named: alone)
    monkeypatch.setattr(Receivers, "init_weight_transfer_engine", tell)
    receivers = Receivers([None, None], WIDTH)
    source = WeightSource(setting.trainer[0]._engine)
    made = NCCLTrainerInitInfo("127.0.0.1", 1, 5, packed_buffer_size_bytes=BUCKET, rank=0)
    with pytest.raises(StopError):
        NCCLTrainerWeightTransferEngine.trainer_init(made, client=receivers, source=source)
    with pytest.raises(StopError):
        _nccl_sender(source, receivers, 0, "127.0.0.1")
    assert told[0] | {"master_port": told[1]["master_port"]} == told[1]
