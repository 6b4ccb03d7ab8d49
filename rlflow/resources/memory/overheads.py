"""Memory that a process holds on its GPU besides the state of its model, and memory during a weight sync.

All terms are in GiB.
"""

from dataclasses import dataclass

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.state import TrainingMemory, persistent_buffers, pipeline_stages, state_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import adapter_parameters

# The CUDA context with the kernels of torch: 0.4 to 0.6 GiB on A100 and H100, as nvidia-smi shows for an idle process.
CONTEXT_GIB = 0.55
# An NCCL communicator: the buffers of its channels, 2 x 4 MiB for each of about 24 channels.
NCCL_COMMUNICATOR_GIB = 0.2
# NCCL's kernels and what else it takes with the first communicator of a process: FSDP with adapters on 2 and 4 A100
# has 1.2 to 1.9 GiB more in nvidia-smi than one GPU, extrapolated to no tokens (fms-acceleration, 18 runs). DeepSpeed
# creates one on a single GPU too: on an H200 its process has 1.66 GiB besides torch's, with ZeRO 1, 2 and 3.
NCCL_GIB = 1.2
# All-to-all between the GPUs of experts has buffers for every peer: 4 channels, both ways, of about 5 MiB (4 MiB of
# NCCL_BUFFSIZE, and those of the protocols for short messages). Over 10 GB with some hundred peers.
NCCL_PEER_GIB = 0.04


@dataclass(frozen=True)
class Sharp:
    """The NVLink SHARP of a kind of GPU, whose switches reduce numbers, and NCCL's buffers for it."""

    channels: int = 0
    """NCCL channels on this kind of GPU; 0 where the switches cannot reduce."""
    gpus: int = 0
    """The largest number of GPUs in a host."""

    def gib(self, size: int) -> float:
        """Return the size of the buffers on each GPU for a communicator of ``size`` GPUs.

        NCCL does not use it for two GPUs (vllm-project/vllm, issue 9699). Otherwise each GPU holds a part for every GPU
        of its host: two buffers for each channel, of 8 slots (NCCL_STEPS) of 128 KiB (NCCL_NVLS_CHUNKSIZE) each (NCCL
        2.27, src/transport/nvls.cc, ncclNvlsBufferSetup; its log says nvlsTotalSize 268435456 for eight H100).
        """
        size = min(size, self.gpus)
        return self.channels * 2 * size / 1024 if size > 2 else 0.0


NO_SHARP = Sharp()


def process_terms(layout: Layout, sharp: Sharp = NO_SHARP) -> dict[str, float]:
    """Return the terms of a process: its CUDA context, and a communicator for each way of parallelism.

    Data- and sequence-parallel ranks have one together, for the state that they shard.
    A process of DeepSpeed, whose layout has a ZeRO stage, loads NCCL on a single GPU too.
    """
    ways = [
        size
        for size in (
            layout.data_parallel_size * layout.sequence_parallel_size,
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
            layout.sequence_parallel_size,
        )
        if size > 1
    ]
    # The ranks of an engine have all tokens, and send none to each other.
    peers = layout.expert_parallel_size if layout.expert_parallel_size > 1 and layout.eager is None else 0
    loads_nccl = bool(ways) or layout.zero_stage is not None
    nccl = NCCL_GIB * loads_nccl + NCCL_COMMUNICATOR_GIB * len(ways) + NCCL_PEER_GIB * peers
    return {"nccl": nccl + sum(sharp.gib(size) for size in ways), "context": CONTEXT_GIB}


def graphs_gib(model: Architecture | None) -> float:
    """Return the size of CUDA graphs for all batch sizes: vLLM logs 0.4 to 1.2 GiB for models of 24 to 80 layers."""
    return 0.4 + 0.01 * (model.num_hidden_layers if model else 32)


def asleep_terms(
    model: Architecture, largest_group: int = 1, sharp: Sharp = NO_SHARP, *, eager: bool = False
) -> dict[str, float]:
    """Return what vLLM's sleep mode leaves on the GPU: context, CUDA graphs, and the largest possible communicators.

    A group has one of torch and one of vLLM's own (distributed/parallel_state.py): asleep, a model of 1B holds 2440 MiB
    on each of two GPUs and 774 on one (NVIDIA-NeMo/RL, issue 223).
    """
    return {
        "context": CONTEXT_GIB,
        "nccl": NCCL_GIB + 2 * NCCL_COMMUNICATOR_GIB + sharp.gib(largest_group) if largest_group > 1 else 0.0,
        "graphs": 0.0 if eager else graphs_gib(model),
    }


# vLLM's buffer for weights that are sent together, unless one of them is larger (weight_transfer/packed_tensor.py,
# DEFAULT_PACKED_BUFFER_SIZE_BYTES).
PACKED_GIB = 1.0


def sync_terms(
    model: Architecture,
    layout: Layout,
    training: TrainingMemory,
    engine: Layout | None = None,
    *,
    weight_bytes: float = 2,
    packed_bytes: float | None = None,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Return the terms of a trained role while its weights go to an engine that follows it.

    It holds its weights and a gathered part in the engine's type: the largest layer, an end of the model, or the
    adapters. An ``engine`` on the same GPUs adds its weights and graphs; its KV cache comes back afterwards.
    ``packed_bytes`` is the size of a parameter in vLLM's buffer for CUDA IPC, where the weights go through it.
    """
    largest = (
        max(max(stage.layer, stage.ends) for stage in pipeline_stages(model, layout)) * layout.tensor_parallel_size
    )
    if training.lora is not None:
        # Adapters are merged into what is gathered, or gathered alone.
        largest = adapter_parameters(model, training.lora) + (largest if training.lora.merge else 0)
    terms = {"weights": state_terms(model, layout, training)["weights"], "gathered": weight_bytes * largest / GIB}
    if engine is not None:
        terms["engine"] = (
            weight_bytes * max(stage.dense + stage.experts for stage in pipeline_stages(model, engine)) / GIB
        )
        terms["graphs"] = 0.0 if engine.eager else graphs_gib(model)
        terms |= {f"engine {name}": gib for name, gib in process_terms(engine, sharp).items()}
        if packed_bytes is not None:
            terms |= _packed_terms(model, engine, weight_bytes, packed_bytes)
    return terms | persistent_buffers(layout, training) | process_terms(layout, sharp)


def packed_gib(model: Architecture, packed_bytes: float) -> float:
    """Return the size of the buffer in which a role sends its weights to an engine on the same GPUs."""
    return max(PACKED_GIB, packed_bytes * model.largest_tensor / GIB)


def _packed_terms(model: Architecture, engine: Layout, weight_bytes: float, packed_bytes: float) -> dict[str, float]:
    """Return the sender's buffer, and vLLM's copies of it.

    vLLM copies each tensor of the buffer, keeps copies of tensors of an incomplete layer, and builds its own part of a
    complete layer (model_loader/reload/layerwise.py).
    """
    buffer = packed_gib(model, packed_bytes)
    incomplete = packed_bytes * model.largest_module
    complete = weight_bytes * model.largest_module / engine.tensor_parallel_size
    return {"buffer": buffer, "engine buffer": buffer + (incomplete + complete) / GIB}
