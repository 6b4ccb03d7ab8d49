"""Memory that a process holds on its GPU besides tensors, and keeps while it gives the GPU to others."""

from dataclasses import dataclass

from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

# The CUDA context with the kernels of torch: 0.4 to 0.6 GiB on A100 and H100, as nvidia-smi shows for an idle process.
CONTEXT_GIB = 0.55
# A communicator of NCCL: its channels' buffers, 2 x 4 MiB for each of about 24 channels.
NCCL_COMMUNICATOR_GIB = 0.2
# All-to-all between the GPUs of experts has buffers for every peer: 4 channels, both ways, of about 5 MiB (4 MiB of
# NCCL_BUFFSIZE, and those of the protocols for short messages). Over 10 GB with some hundred peers.
NCCL_PEER_GIB = 0.04


@dataclass(frozen=True)
class Sharp:
    """The NVLink SHARP of a kind of GPU, whose switches add numbers up, and the buffers of NCCL for it."""

    channels: int = 0
    """Blocks that NCCL uses for it on this kind of GPU; 0 where the switch cannot add."""
    gpus: int = 0
    """The largest number of GPUs in a host."""

    def gib(self, size: int) -> float:
        """Return what a communicator of ``size`` GPUs takes on each of them.

        NCCL does not use it for two GPUs (vllm-project/vllm, issue 9699). Else each GPU holds a part for every GPU of
        its host: two buffers a channel, of 8 slots (NCCL_STEPS) of 128 KiB (NCCL_NVLS_CHUNKSIZE) each (NCCL 2.27,
        src/transport/nvls.cc, ncclNvlsBufferSetup; its log says nvlsTotalSize 268435456 for eight H100).
        """
        size = min(size, self.gpus)
        return self.channels * 2 * size / 1024 if size > 2 else 0.0


NO_SHARP = Sharp()


def process_terms(layout: Layout, sharp: Sharp = NO_SHARP) -> dict[str, float]:
    """Return the terms of a process: its CUDA context, and a communicator for every way in which the role is spread."""
    ways = [
        size
        for size in (
            layout.data_parallel_size,
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
            layout.sequence_parallel_size,
        )
        if size > 1
    ]
    peers = layout.expert_parallel_size if layout.expert_parallel_size > 1 else 0
    nccl = NCCL_COMMUNICATOR_GIB * len(ways) + NCCL_PEER_GIB * peers
    return {"nccl": nccl + sum(sharp.gib(size) for size in ways), "context": CONTEXT_GIB}


def graphs_gib(model: Architecture | None) -> float:
    """Return the size of CUDA graphs for all sizes of a batch: vLLM logs 0.4 to 1.2 GiB for models of 24 to 80
    layers."""
    return 0.4 + 0.01 * (model.num_hidden_layers if model else 32)


def asleep_terms(
    model: Architecture, largest_group: int = 1, sharp: Sharp = NO_SHARP, *, eager: bool = False
) -> dict[str, float]:
    """Return what vLLM's sleep mode leaves where it is: the context, CUDA graphs, and a communicator of
    ``largest_group`` GPUs at most."""
    return {
        "context": CONTEXT_GIB,
        "nccl": NCCL_COMMUNICATOR_GIB + sharp.gib(largest_group),
        "graphs": 0.0 if eager else graphs_gib(model),
    }
