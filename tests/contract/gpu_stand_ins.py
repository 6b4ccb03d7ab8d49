"""Stand-ins on the CPU for everything that vLLM's GPU code uses: streams, devices, and gloo in place of NCCL."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._C import _distributed_c10d as c10d

_PATIENCE = timedelta(seconds=60)


class Gloo:
    """vLLM's PyNcclCommunicator with gloo below it. Ranks are threads of this process."""

    made: ClassVar[list["Gloo"]] = []

    def __init__(self, group: Any, device: Any) -> None:
        """Meet all other ranks, as NCCL does."""
        self.rank, self.world_size = group.rank, group.world_size
        self.sent: list[int] = []
        """Bytes of each broadcast."""
        self.is_open = True
        store = c10d.PrefixStore("gloo", group.store)
        gloo: Callable[..., Any] = c10d.ProcessGroupGloo
        self._gloo = gloo(store, self.rank, self.world_size, _PATIENCE)
        self._gloo.allreduce([torch.zeros(1)]).wait()
        Gloo.made.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert self.is_open
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.sent.append(tensor.nbytes)
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self.is_open = False


@contextmanager
def without_gpus(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run vLLM's weight transfer over gloo inside."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    patch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    patch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "synchronize", lambda: None)
    patch.setattr(pynccl, "PyNcclCommunicator", Gloo)
    Gloo.made.clear()
    yield


class Actor:
    """Ray's handle of a process, with a thread in its place. ``ray.get`` is ``results``."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._threads = ThreadPoolExecutor(4)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any, **named: Any) -> "Future[Any]":
            return self._threads.submit(getattr(self._worker, method), *arguments, **named)

        return SimpleNamespace(remote=remote)


def results(calls: "Sequence[Future[Any]]") -> list[Any]:
    return [call.result(_PATIENCE.seconds) for call in calls]


def at_once(*functions: Any) -> list[Any]:
    """Call each in a thread of its own, and return what they return."""
    barrier = threading.Barrier(len(functions))

    def run(function: Any) -> Any:
        barrier.wait(_PATIENCE.seconds)
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        return results([threads.submit(run, function) for function in functions])
