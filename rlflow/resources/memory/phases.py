"""GPU and host memory in each phase of a role's work, as named terms in GiB.

Every function returns the terms of the role's fullest GPU. ``tokens`` is always the number of tokens in the
micro-batch, before sequence parallelism divides it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.activations import copied_bytes, layer_bytes
from rlflow.resources.memory.allocator import Allocator, allocator_of
from rlflow.resources.memory.gathered import are_ends_apart, gathered_bytes
from rlflow.resources.memory.images import encoding_bytes
from rlflow.resources.memory.overheads import NO_SHARP, Sharp, graphs_gib, process_terms
from rlflow.resources.memory.state import (
    MIXED_PRECISION,
    Stage,
    TrainingMemory,
    frozen_encoder_parameters,
    persistent_buffers,
    pipeline_stages,
    sharded_parameters,
    stage_state,
    state_terms,
    total_gib,
)
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import Lora, adapter_parameters, reserved_rank

# Memory that the driver reserves: torch's reports of exhausted memory give cards of 79.6 and 80 GiB 79.1 to 79.3.
DRIVER_GIB = 0.5
# Bytes for each value of a matrix that Muon works on: two in fp32, and four in bf16.
_MUON_BYTES = 16.0
# Tokens in a step of vLLM. The engine gets this value, because its default depends on the kind of GPU.
MAX_BATCHED_TOKENS = 8192


def usable_gib(memory_gib: float) -> float:
    """Return the usable part of a GPU's memory, given what nvidia-smi reports."""
    return memory_gib - DRIVER_GIB


def update_terms(
    model: Architecture,
    layout: Layout,
    training: TrainingMemory,
    tokens: float,
    *,
    accumulates: bool = True,
    allocator: Allocator | None = None,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Return the terms of a trained role at the peak of its update; it ``accumulates`` gradients of micro-batches."""
    allocator = allocator or allocator_of(layout)
    fixed, candidates = persistent_buffers(layout, training) | process_terms(layout, sharp), []
    for stage in pipeline_stages(model, layout):
        state = stage_state(model, layout, training, stage)
        for moment in _moments(model, layout, training, stage, tokens):
            gradients = state["gradients"] * (1 if accumulates else moment.gradients)
            moving = {name: size / GIB for name, size in moment.terms.items()}
            moving["fragmentation"] = allocator.gaps(moving)
            candidates.append(state | {"gradients": gradients} | moving | fixed)
    return max(candidates, key=total_gib)


def cached_gib(
    model: Architecture,
    layout: Layout,
    training: TrainingMemory,
    tokens: float,
    *,
    accumulates: bool = True,
    allocator: Allocator | None = None,
    sharp: Sharp = NO_SHARP,
) -> float:
    """Return what the allocator keeps reserved after an update besides the terms of its peak.

    At most that is what every kind of tensor needed at some moment. It is released where memory runs out.
    """
    allocator = allocator or allocator_of(layout)
    largest = 0.0
    for stage in pipeline_stages(model, layout):
        moments = list(_moments(model, layout, training, stage, tokens))
        names = {name for moment in moments for name in moment.terms}
        moving = {name: max(moment.terms.get(name, 0.0) for moment in moments) / GIB for name in names}
        fixed = persistent_buffers(layout, training) | process_terms(layout, sharp)
        state = total_gib(stage_state(model, layout, training, stage)) + total_gib(fixed)
        largest = max(largest, state + sum(moving.values()) + allocator.gaps(moving))
    terms = update_terms(model, layout, training, tokens, accumulates=accumulates, allocator=allocator, sharp=sharp)
    return allocator.cached * max(0.0, largest - total_gib(terms))


@dataclass(frozen=True)
class Moment:
    """A moment of an update: what it holds besides the state, in bytes."""

    gradients: float
    """The share of the gradients that a single micro-batch has computed by then."""
    terms: dict[str, float]


def _moments(
    model: Architecture, layout: Layout, training: TrainingMemory, stage: Stage, tokens: float
) -> Iterator[Moment]:
    """Yield the moments that may be the peak.

    These are the loss; the backward pass of the last layer, of the first, of embedding and head; and the optimizer
    step.
    """
    per_rank = tokens / layout.sequence_parallel_size
    layer, saved = layer_bytes(model, layout, training, per_rank)
    saved_layers, first_gradients = saved * stage.num_layers, layer
    if layout.kept_layers:
        keeping = replace(layout, gradient_checkpointing=False)
        of_kept, kept = layer_bytes(model, keeping, training, per_rank)
        saved_layers += (kept - saved) * layout.kept_layers
        # The first gradients are those of the kept layers, which are gone when others are recomputed.
        first_gradients = max(of_kept, layer - kept * layout.kept_layers)
    saved_activations = 0.0 if training.offloads_activations else saved_layers * stage.in_flight
    # Embeddings that layers have of their own (Gemma 4): looked up, projected, normalised in fp32, and their sum.
    saved_activations += per_rank * 12 * model.num_hidden_layers * model.hidden_size_per_layer_input
    encoding, encoded = encoding_bytes(model, layout, training)
    saved_activations += encoded
    logits = per_rank * model.num_outputs / layout.tensor_parallel_size if stage.head else 0.0
    trained = 1.0 if training.lora is None else 0.0
    are_apart = are_ends_apart(training, stage)
    loss, output = training.logits * logits, min(2.0, training.logits) * logits
    if training.fused_loss:
        # Chunks have as many tokens as make their logits as large as the hidden states (Liger's FLCE).
        loss, output = training.logits * per_rank * model.hidden_size, 0.0
    elif logits > training.logits_at_once:
        # The gradients of the hidden states and of the head are accumulated chunk by chunk.
        accumulated = 4 * per_rank * model.hidden_size
        if not are_apart:
            accumulated += trained * training.weights * stage.head
        loss, output = training.logits * training.logits_at_once + accumulated, 0.0
    whole = stage.dense + stage.experts
    zero = layout.zero_stage or 0
    copies = copied_bytes(model, layout, training, per_rank)
    gathered = gathered_bytes(layout, training, stage, copies)
    reduced = trained * training.reduce_bytes[zero] * _reduced_at_once(training, stage, zero)
    at_loss, in_last, in_layers, at_ends = (size + reduced for size in vars(gathered).values())
    # The shares of the gradients that there are after the head, after all layers, and at the end.
    held = layout.num_shards * sharded_parameters(layout, stage) if training.gathers_apart else whole
    after_layers = 1 - (stage.ends - stage.head if are_apart else stage.ends) / held
    after_head, at_end = (stage.head / held, 1.0) if are_apart else (0.0, after_layers)
    last_norm = per_rank * 8 * model.hidden_size if stage.head else 0.0
    yield Moment(after_head, {"activations": saved_activations + last_norm, "logits": loss, "gathered": at_loss})
    yield Moment(
        after_head, {"activations": saved_activations + first_gradients, "logits": output, "gathered": in_last}
    )
    # With experts on other GPUs, the peak of the first layer comes before its own gradients do.
    in_first = after_layers - (1 - stage.ends / held) / stage.num_layers * bool(copies)
    yield Moment(in_first, {"activations": saved + layer + encoded, "logits": output, "gathered": in_layers})
    yield Moment(encoded and after_layers, {"activations": encoding + encoded, "logits": 0.0, "gathered": at_ends})
    yield Moment(at_end, {"activations": 0.0, "logits": output, "gathered": at_ends})
    if layout.offload in (None, "none"):
        nothing = {"activations": 0.0, "logits": 0.0, "gathered": 0.0}
        yield Moment(1.0, nothing | {"step": _step_bytes(model, layout, training, stage)})


def _step_bytes(model: Architecture, layout: Layout, training: TrainingMemory, stage: Stage) -> float:
    """Return the temporary bytes of the optimizer's step; adapters are in fp32."""
    shards = sharded_parameters(layout, stage) / (stage.dense + stage.experts) if layout.zero_stage else 1.0
    if training.muon:
        # Two thirds of a layer's experts are one tensor.
        matrix = model.hidden_size * model.intermediate_size / layout.tensor_parallel_size
        return _MUON_BYTES * max(matrix, stage.experts_layer * 2 / 3)
    if training.lora is None:
        return training.step * min(shards * (stage.dense + stage.experts), training.step_parameters)
    trained = adapter_parameters(model, training.lora) * stage.num_layers / model.num_hidden_layers
    ends = training.step * shards * stage.ends if training.trains_ends else 0.0
    return ends + (4.0 if training.step else 0.0) * shards * trained / layout.tensor_parallel_size


def _reduced_at_once(training: TrainingMemory, stage: Stage, zero: int) -> float:
    """Return the most gradients that are reduced together: a bucket, or where they are widened the largest tensor."""
    widened = training.reduce_bytes[zero] > training.weights
    # The experts of a layer are two tensors, one of them with two thirds of it.
    largest = max(stage.head, stage.ends - stage.head, stage.layer if stage.experts else 0.0) if widened else 0.0
    return min(max(training.bucket_elements, largest), stage.dense + stage.experts)


def score_terms(
    model: Architecture,
    layout: Layout,
    tokens: float,
    *,
    weight_bytes: float = 2,
    training: TrainingMemory = MIXED_PRECISION,
    sharp: Sharp = NO_SHARP,
) -> dict[str, float]:
    """Return the terms of a forward pass: weights, a layer's activations, the logits and their log-softmax."""
    stage = max(pipeline_stages(model, layout), key=lambda stage: stage.dense + stage.experts + stage.head)
    zero, whole = layout.zero_stage or 0, stage.dense + stage.experts
    per_rank = tokens / layout.sequence_parallel_size / layout.tensor_parallel_size
    # A forward pass has no gradients of the logits.
    logit_bytes = max(2.0, training.logits - 4)
    logits = per_rank * (model.hidden_size if training.fused_loss else model.num_outputs)
    gathered = 0.0
    if zero == 3 and layout.num_shards > 1:
        gathered = 2 * max(2 * stage.layer, stage.layer + stage.ends)
    encoding, _ = encoding_bytes(model, layout, training)
    moving = {
        "activations": max(per_rank * (8 * model.hidden_size + 6 * model.mlp_width), encoding) / GIB,
        "logits": logit_bytes * min(logits, training.logits_at_once) / GIB,
        "gathered": gathered / GIB,
    }
    moving["fragmentation"] = allocator_of(layout).gaps(moving)
    parameters = sharded_parameters(layout, stage) if zero == 3 else whole
    weights = weight_bytes * (parameters + frozen_encoder_parameters(model, layout)) / GIB
    weights *= layout.offload != "weights"
    return {"weights": weights} | moving | process_terms(layout, sharp)


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one GPU of a generating engine while it is awake."""

    terms: dict[str, float]
    kv_tokens: float
    """Tokens in the KV cache of the whole tensor-parallel group."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The most that one step of a serving engine works on, for which it reserves memory."""

    max_num_seqs: int = 256
    max_batched_tokens: int = MAX_BATCHED_TOKENS


def generate_memory(
    model: Architecture,
    layout: Layout,
    memory_gib: float,
    limits: StepLimits = StepLimits(),
    *,
    weight_bytes: float = 2,
    lora: Lora | None = None,
    sharp: Sharp = NO_SHARP,
) -> EngineMemory:
    """Return how a serving engine divides its ``gpu_memory_utilization`` of a GPU.

    Weights, the peak of a step and CUDA graphs leave the rest to the KV cache (vllm/v1/worker/gpu_worker.py,
    determine_available_memory). ``kv_tokens`` is zero or negative when the rest does not fit.
    """
    budget = (layout.gpu_memory_utilization or 0.9) * memory_gib
    width = layout.tensor_parallel_size
    weights = max(stage.dense + stage.experts for stage in pipeline_stages(model, layout))
    mlp_width = model.mlp_width / (1 if layout.expert_parallel_size > 1 else width)
    peak = limits.max_batched_tokens * (4 * model.hidden_size + 4 * mlp_width + 4 * model.query_width / width)
    peak += limits.max_num_seqs * model.vocab_size * 10
    terms = {
        "weights": weight_bytes * (weights + model.num_encoder_parameters) / GIB,
        "engine": peak / GIB,
        "graphs": 0.0 if layout.eager else graphs_gib(model),
    }
    if lora is not None:
        # Every rank has all of A, and at most all of B, padded with zeros.
        room = adapter_parameters(model, replace(lora, rank=reserved_rank(lora)))
        terms["adapters"] = weight_bytes * room / layout.pipeline_parallel_size / GIB
    # Copies of an engine do not communicate.
    terms |= process_terms(replace(layout, data_parallel_size=1), sharp)
    left = budget - sum(terms.values())
    # Each GPU holds its share of the heads. Key-value heads are copied if there are fewer than GPUs; latents always.
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
    """Return host memory for one GPU of a trained role: offloaded state, and its part of the data between roles.

    ``offloads``: all state moves to the host while others use the GPU.
    """
    away = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    is_partly_away = layout.offload in ("optimizer", "weights")
    if offloads or is_partly_away:
        placed = state_terms(model, layout, training)
        whole = state_terms(model, replace(layout, offload="none"), training)
        away = {name: whole[name] if offloads else whole[name] - placed[name] for name in whole}
    if is_partly_away:
        # The optimizer holds an fp32 copy of the gradients on the host, beside their accumulation buffer.
        fp32 = state_terms(model, replace(layout, offload="none"), replace(training, optimizer=4))
        away["gradients"] += fp32["optimizer"]
    return away | (persistent_buffers(layout, training) if offloads else {}) | {"data": data_gib}
