"""The calls of a weight sync from GPU to GPU, to workers that only record them."""

from concurrent.futures import Future
from typing import Any

from rlflow.engines.registry import engine_kind
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.weights.sync import sync_weights


class Recorder:
    """Two workers of a role that answer at once."""

    num_gpus_each = 1
    address = "10.0.0.1"

    def __init__(self, transport: str | None) -> None:
        self.actors = ["first", "second"]
        self.gpu_transport: Any = transport
        self.receivers_connected = False
        self.calls: list[tuple[str, *tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return 2

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[None]":
        self.calls.append((method, *arguments))
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer

    def call_all(self, method: str, *arguments: Any) -> "list[Future[None]]":
        return [self.call(rank, method, *arguments) for rank in range(2)]

    def dead_ranks(self) -> list[int]:
        return []


def test_engines_accept_the_weights_once_all_are_sent() -> None:
    trainer: Any = Recorder(None)
    followers: Any = Recorder("nccl")
    sync_weights(trainer, followers, version=7)
    assert [call[0] for call in trainer.calls] == ["disconnect_receivers"] * 2 + ["send_gpu_to_gpu"] * 2
    assert followers.calls == [("call", "finish_transfer", 7)] * 2
    assert all(hasattr(EngineWorker, call[0]) for call in trainer.calls + followers.calls)
    assert hasattr(engine_kind("vllm").engine, "finish_transfer")
    # The engines stay connected.
    sync_weights(trainer, followers, version=8)
    assert [call[0] for call in trainer.calls[4:]] == ["send_gpu_to_gpu"] * 2
