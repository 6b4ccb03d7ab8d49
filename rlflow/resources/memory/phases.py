"""What a GPU and its host hold in each phase of a role's work, as named terms in GiB.

Every function gives the terms of the role's fullest GPU. ``tokens`` is always the number in the micro-batch, before
sequence parallelism divides it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.overheads import NO_SHARP, Sharp, graphs_gib, process_terms
from rlflow.resources.memory.state import (
    MIXED_PRECISION,
    Stage,
    TrainingMemory,
    layer_activations,
    persistent_buffers,
    pipeline_stages,
    sharded_parameters,
    stage_state,
    state_terms,
    total_gib,
)
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import Lora, adapter_parameters

# What the driver keeps to itself: torch's reports of exhausted memory give cards of 79.6 and 80 GiB 79.1 to 79.3.
DRIVER_GIB = 0.5
# Of what is allocated and freed all the time, the share that the caching allocator holds beyond it. NeMo-RL measured
# 71.2 GiB reserved for 62.5 GiB in use, state included, with packed micro-batches (NVIDIA-NeMo/RL, pull request 3476).
FRAGMENTATION = 0.12
# Tokens of a step of vLLM, which the engine is told: its own default depends on the kind of GPU.
MAX_BATCHED_TOKENS = 8192
# Of adapters, that vLLM has room for: smaller ones are filled up.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def usable_gib(memory_gib: float) -> float:
    """Of a GPU with so much memory as nvidia-smi reports."""
    return memory_gib - DRIVER_GIB


def update_terms(
    model: Architecture,
    layout: Layout,
    training: TrainingMemory,
    tokens: float,
    *,
    accumulates: bool = True,
    fragmentation: float = FRAGMENTATION,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Of a trained role at the fullest moment of its update.

    ``accumulates``: gradients of earlier micro-batches are there from the start.
    """
    candidates = []
    for stage in pipeline_stages(model, layout):
        state = stage_state(model, layout, training, stage)
        for moment in _moments(model, layout, training, stage, tokens):
            gradients = state["gradients"] * (1 if accumulates else moment.gradients)
            moving = {name: size / GIB for name, size in moment.terms.items()}
            moving["fragmentation"] = fragmentation * sum(moving.values())
            kept = persistent_buffers(layout, training) | process_terms(layout, sharp)
            candidates.append(state | {"gradients": gradients} | moving | kept)
    return max(candidates, key=total_gib)


@dataclass(frozen=True)
class Moment:
    """Of an update: bytes besides the state."""

    gradients: float
    """The share of the gradients that a single micro-batch has made by then."""
    terms: dict[str, float]


def _moments(
    model: Architecture, layout: Layout, training: TrainingMemory, stage: Stage, tokens: float
) -> Iterator[Moment]:
    """The loss; the backward pass of the last layer, of the first, of embedding and head; the optimizer's step."""
    per_rank = tokens / layout.sequence_parallel_size
    layer, saved = _layer_bytes(model, layout, training, per_rank)
    kept = saved * stage.num_layers * stage.in_flight
    logits = per_rank * model.num_outputs / layout.tensor_parallel_size if stage.head else 0.0
    full = training.lora is None
    trained = 1.0 if full else 0.0
    loss, output = training.logits * logits, min(2.0, training.logits) * logits
    if training.fused_loss:
        # In chunks of as many tokens as make their logits as large as the hidden states (Liger's FLCE).
        loss, output = training.logits * per_rank * model.hidden_size, 0.0
    elif logits > training.logits_at_once:
        # Besides them the gradients of the hidden states and of the head, which are put together chunk by chunk.
        put_together = 4 * per_rank * model.hidden_size + trained * training.weights * stage.head
        loss, output = training.logits * training.logits_at_once + put_together, 0.0
    whole = stage.dense + stage.experts
    zero = layout.zero_stage or 0
    shared = layout.data_parallel_size * layout.sequence_parallel_size > 1
    if zero == 3 and training.live_parameters is None:
        ahead = 2 * stage.layer if shared else 0.0
        at_loss = 2 * stage.ends + ahead
        # The layer, the one gathered ahead, its gradient in bf16 and in fp32 to be reduced, and the head's gradient.
        in_layers = 2 * stage.ends + 2 * stage.layer + ahead + trained * (6 * stage.layer + 2 * stage.head)
        at_ends = trained * 6 * stage.ends
    elif zero == 3:
        largest = 2 * max(stage.head, stage.ends - stage.head, 2 * stage.layer)
        live = 2 * min(whole, training.live_parameters or 0)
        at_loss = in_layers = at_ends = max(largest, live)
        in_layers += trained * training.weights * stage.layer
        at_ends += trained * training.weights * max(stage.head, stage.ends - stage.head)
    else:
        at_loss = in_layers = at_ends = 0.0
        if zero == 0 and shared and training.bucket_elements:
            # DistributedDataParallel's buckets are a copy of the gradients.
            at_loss = in_layers = at_ends = trained * training.gradients * whole
    reduced = trained * training.reduce_bytes[zero] * _reduced_at_once(training, stage, zero)
    at_loss, in_layers, at_ends = (size + reduced for size in (at_loss, in_layers, at_ends))
    made = stage.ends / whole
    last_norm = per_rank * 8 * model.hidden_size if stage.head else 0.0
    yield Moment(0.0, {"activations": kept + last_norm, "logits": loss, "gathered": at_loss})
    yield Moment(0.0, {"activations": kept + layer, "logits": output, "gathered": in_layers})
    yield Moment(1 - made, {"activations": saved + layer, "logits": output, "gathered": in_layers})
    yield Moment(1 - made, {"activations": 0.0, "logits": output, "gathered": at_ends})
    if full and layout.offload in (None, "none"):
        stepping = min(sharded_parameters(layout, stage) if zero else whole, training.step_parameters)
        yield Moment(1.0, {"activations": 0.0, "logits": 0.0, "gathered": training.step * stepping})


def _reduced_at_once(training: TrainingMemory, stage: Stage, zero: int) -> float:
    """Return the most gradients that are reduced together: a bucket, or where they are widened the largest tensor."""
    widened = training.reduce_bytes[zero] > training.weights
    # The experts of a layer are two tensors, one of them with two thirds of it.
    largest = max(stage.head, stage.ends - stage.head, stage.layer if stage.experts else 0.0) if widened else 0.0
    return min(max(training.bucket_elements, largest), stage.dense + stage.experts)


def _layer_bytes(model: Architecture, layout: Layout, training: TrainingMemory, tokens: float) -> tuple[float, float]:
    """Of a layer while its gradients are computed, and of what is kept for it until then, besides."""
    tensor = layout.tensor_parallel_size
    bytes_ = layer_activations(model, fused=training.fused_layers)
    around = tensor if training.shards_norms else 1
    everything = tokens * (bytes_.whole / around + bytes_.split / tensor)
    # The gradient that goes through the MLP's product.
    gradient = tokens * 2 * model.mlp_width / tensor
    if layout.gradient_checkpointing:
        return everything + gradient, tokens * 2 * model.hidden_size / around
    return gradient, everything


def score_terms(
    model: Architecture,
    layout: Layout,
    tokens: float,
    *,
    weight_bytes: float = 2,
    training: TrainingMemory = MIXED_PRECISION,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Of a role whose model only runs forward: weights, a layer's activations, the logits and their log-softmax."""
    stage = max(pipeline_stages(model, layout), key=lambda stage: stage.dense + stage.experts + stage.head)
    zero, whole = layout.zero_stage or 0, stage.dense + stage.experts
    per_rank = tokens / layout.sequence_parallel_size / layout.tensor_parallel_size
    # No gradients of the logits.
    logit_bytes = max(2.0, training.logits - 4)
    logits = per_rank * (model.hidden_size if training.fused_loss else model.num_outputs)
    gathered = 0.0
    if zero == 3 and layout.data_parallel_size * layout.sequence_parallel_size > 1:
        gathered = 2 * max(2 * stage.layer, stage.layer + stage.ends)
    moving = {
        "activations": per_rank * (8 * model.hidden_size + 6 * model.mlp_width) / GIB,
        "logits": logit_bytes * min(logits, training.logits_at_once) / GIB,
        "gathered": gathered / GIB,
    }
    moving["fragmentation"] = FRAGMENTATION * sum(moving.values())
    weights = weight_bytes * (sharded_parameters(layout, stage) if zero == 3 else whole) / GIB
    weights *= layout.offload != "weights"
    return {"weights": weights} | moving | process_terms(layout, sharp)


@dataclass(frozen=True)
class EngineMemory:
    """Of one GPU of a generating engine while it is awake."""

    terms: dict[str, float]
    kv_tokens: float
    """That its whole tensor-parallel group holds."""


def generate_memory(
    model: Architecture,
    layout: Layout,
    memory_gib: float,
    *,
    max_num_seqs: int = 256,
    max_batched_tokens: int = MAX_BATCHED_TOKENS,
    weight_bytes: float = 2,
    lora: Lora | None = None,
    sharp: Sharp = NO_SHARP,
) -> EngineMemory:
    """How an engine of vLLM's kind uses ``gpu_memory_utilization`` of a GPU: what weights, the peak of a step and CUDA
    graphs leave is for keys and values (vllm/v1/worker/gpu_worker.py, determine_available_memory).

    ``kv_tokens`` is not positive when the rest does not fit.
    """
    budget = (layout.gpu_memory_utilization or 0.9) * memory_gib
    width = layout.tensor_parallel_size
    weights = max(stage.dense + stage.experts for stage in pipeline_stages(model, layout))
    peak = max_batched_tokens * (4 * model.hidden_size + (4 * model.mlp_width + 4 * model.query_width) / width)
    peak += max_num_seqs * model.vocab_size * 10
    terms = {
        "weights": weight_bytes * weights / GIB,
        "engine": peak / GIB,
        "graphs": 0.0 if layout.eager else graphs_gib(model),
    }
    if lora is not None:
        # Every rank has all of A, and no more than all of B, filled up with noughts.
        rank = next((rank for rank in LORA_RANKS if rank >= lora.rank), lora.rank)
        room = adapter_parameters(model, replace(lora, rank=rank))
        terms["adapters"] = weight_bytes * room / layout.pipeline_parallel_size / GIB
    terms |= process_terms(layout, sharp)
    left = budget - sum(terms.values())
    # Each GPU holds its share of the heads. Fewer key-value heads than GPUs are copied, as latents always are.
    heads = 1 if model.kv_lora_rank else min(model.num_key_value_heads, width)
    per_token = 2 * model.kv_values_per_token / heads / layout.pipeline_parallel_size
    terms["kv"] = max(0.0, left)
    return EngineMemory(terms, left * GIB / per_token)


def host_terms(
    model: Architecture,
    layout: Layout,
    training: TrainingMemory,
    *,
    offloads: bool = False,
    data_gib: float = 0.0,
) -> dict[str, float]:
    """Of the host's memory, for one GPU of a trained role: what is offloaded or parked there while others use the GPU,
    and its part of the data between roles."""
    placed = state_terms(model, layout, training)
    whole = state_terms(model, replace(layout, offload="none"), training)
    away = {name: whole[name] if offloads else whole[name] - placed[name] for name in whole}
    if layout.offload in ("optimizer", "weights"):
        # The optimizer has a copy in fp32 there, beside what gradients were added up in.
        own = state_terms(model, replace(layout, offload="none"), replace(training, optimizer=4))
        away["gradients"] += own["optimizer"]
    return away | (persistent_buffers(layout, training) if offloads else {}) | {"data": data_gib}
