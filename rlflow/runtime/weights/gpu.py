"""Weights from GPU to GPU by vLLM's own transfer engines: CUDA IPC on the same GPUs, NCCL between others."""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import GpuTransport, Trains
from rlflow.engines.buckets import join_parts
from rlflow.engines.memory import without_expandable_segments

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource:
    """An engine's weights in the form that vLLM's senders read."""

    def __init__(self, engine: Trains) -> None:
        self._engine = engine
        self._metadata: list[Any] = []

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        return join_parts(self._engine.weights())

    def metadata(self) -> list[Any]:
        """Return name, type and shape of each weight in vLLM's form. They never change."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        if not self._metadata:
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._metadata

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest tensor in bytes."""
        sizes: list[int] = [prod(weight.shape) * weight.dtype.itemsize for weight in self.metadata()]
        return max(sizes)


class Receivers:
    """The vLLM engines of a role, as vLLM's senders call them."""

    def __init__(self, actors: Sequence[Any], gpus_each: int) -> None:
        """Take the Ray handles of EngineWorkers, each with ``gpus_each`` GPUs."""
        self._actors = actors
        self._gpus_each = gpus_each

    @property
    def num_gpus(self) -> int:
        return len(self._actors) * self._gpus_each

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all engines to a sender. Engines that were connected to another one leave it first."""
        self._call("shutdown_weight_transfer_engine", [{}] * len(self._actors))
        infos = [
            # Each engine's ranks follow those of the one before it.
            init_info | {"rank_offset": init_info["rank_offset"] + index * self._gpus_each}
            if "rank_offset" in init_info
            else init_info
            for index in range(len(self._actors))
        ]
        self._call("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._call("start_weight_update", [{}] * len(self._actors))

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", [{"update_info": update_info}] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", [{}] * len(self._actors))

    def _call(self, method: str, arguments: Sequence[dict[str, Any]]) -> None:
        import ray

        calls = zip(self._actors, arguments, strict=True)
        ray.get([actor.call.remote("transfer", method, keywords) for actor, keywords in calls])


def make_sender(engine: Trains, transport: GpuTransport, receivers: Receivers, *, rank: int, address: str) -> Any:
    """Return vLLM's sender for this rank of a trainer. Rank 0 sends; the others take part in gathering the weights.

    ``address`` is the address of rank 0's host, where NCCL's process group meets.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    source = WeightSource(engine)
    if transport == "ipc":
        # Packed, since unpacked tensors all stay in memory until the last one is sent. vLLM refuses a tensor that is
        # larger than its buffer.
        size = max(IPCTrainerInitInfo.packed_buffer_size_bytes, source.largest_bytes)
        ipc = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=rank)
        return IPCTrainerWeightTransferEngine.trainer_init(ipc, client=receivers, source=source)
    return _nccl_sender(source, receivers, rank, address)


def send_weights(sender: Any, transport: GpuTransport) -> None:
    """Send all weights once, from GPU memory that the receivers can map."""
    with without_expandable_segments() if transport == "ipc" else nullcontext():
        sender.send_weights()


def _nccl_sender(source: WeightSource, receivers: Receivers, rank: int, address: str) -> Any:
    """Connect a sender and all receivers, as vLLM's ``trainer_init`` does.

    ``trainer_init`` takes the number of a port, which another process may take before vLLM listens there: receivers
    would then wait for ever for an answer from a stranger. Here the port is open before its number is sent.
    """
    import torch
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
    from vllm.utils.nccl import unpinned_nccl_env

    engine = NCCLTrainerWeightTransferEngine(client=receivers, source=source, is_sender=rank == 0)
    if rank > 0:
        return engine
    ranks = 1 + receivers.num_gpus
    with socket.create_server((address, 0)) as listening, ThreadPoolExecutor(1) as thread:
        port = listening.getsockname()[1]
        info = NCCLWeightTransferInitInfo(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=ranks,
            packed=engine.packed,
            packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
            packed_num_buffers=engine.packed_num_buffers,
        )
        connected = thread.submit(receivers.init_weight_transfer_engine, worker_init_payload(info))
        group = StatelessProcessGroup.create(address, port, 0, ranks, listen_socket=listening)
        with unpinned_nccl_env():
            device = torch.accelerator.current_device_index()
            engine.model_update_group = PyNcclCommunicator(group, device=device)
        connected.result()
    return engine
