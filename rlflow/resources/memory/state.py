"""The state of a trained model: how a library keeps weights, gradients and optimizer, and what one GPU holds of it.

Activations are those of flash attention in bf16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.figures import Recurrent
from rlflow.resources.models.layers import LayerKind, traits_of
from rlflow.resources.models.lora import Lora, adapter_inputs, adapter_parameters


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that the backward pass needs of one token in one layer."""

    whole: float
    """Values of the hidden state's width: every tensor-parallel rank has all of them, unless its norms are sharded
    too."""
    split: float
    """Values of the heads' and the MLP's width, which tensor parallelism divides."""


def layer_activations(model: Architecture, kind: LayerKind, *, fused: bool) -> LayerActivations:
    """Return a layer's activations after Korthikanti et al. 2022, section 4.1, for gated MLPs and grouped queries.

    ``fused``: the kernels of Transformer Engine and Megatron. Otherwise the operations of transformers one by one;
    these are exactly the tensors that torch's tracker counts for Qwen2 (benchmarks/fsdp_memory.py). There is no
    dropout.
    """
    hidden, queries, output, keys = model.hidden_size, kind.queries, kind.output, kind.keys
    split: float = 0.0
    if kind.recurrent is not None:
        split += _recurrent_activations(kind.recurrent, fused=fused)
    elif queries:
        # Query, keys, values and output of the attention; its log-sum-exp.
        split += 2 * (queries + keys + output) + 4 * model.num_attention_heads
        # The gate, and its product with the output.
        split += 4 * kind.gate
    if fused:
        # A norm's input and output; of the MLP gate, up and their product.
        whole = kind.num_norms * 4 * hidden
        split += 6 * kind.mlp_width
    else:
        # A norm's input in fp32, what it is normalised to, and its output; the activation of the gate besides.
        whole = kind.num_norms * 8 * hidden
        split += 8 * kind.mlp_width
        if queries and traits_of(model).head_norms:
            split += 6 * (queries + keys / 2)
    if kind.sparse and model.num_experts_per_tok:
        # The token is copied for each of its experts, and each gives its output.
        whole += 4 * (model.moe_latent_size or hidden) * model.num_experts_per_tok
    return LayerActivations(whole, split)


def _recurrent_activations(recurrent: Recurrent, *, fused: bool) -> float:
    """Return the bytes that the kernels of flash-linear-attention and mamba-ssm save of one token for the backward.

    These are what the input is projected to, the convolved part of it with keys repeated for each head of values, and
    the output before and after its gated norm.
    """
    values, keys = recurrent.value_width, recurrent.num_heads * recurrent.key_head_dim
    if not recurrent.num_key_heads:
        return 2.0 * (recurrent.projected_width + 2 * values)
    # Mamba's heads share the keys of a group, and its kernel computes the convolution again.
    keys = keys if recurrent.num_key_heads > recurrent.num_heads // 4 else recurrent.key_width
    saved = 2.0 * (recurrent.projected_width + 2 * keys + 3 * values)
    # Without a fused kernel the norm of the output is computed in fp32.
    return saved if fused else saved + 8 * values


Terms = Mapping[str, float]
"""GiB by name."""

# Adapters in fp32, with gradients and both moments of Adam.
_ADAPTER_BYTES = {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0}


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The memory of training: bytes per parameter of weights, gradients and optimizer, and temporary buffers."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """An fp32 master copy and Adam's two moments (Rajbhandari et al. 2020, ZeRO, section 3.1)."""
    lora: Lora | None = None
    """Adapters; the weights are frozen and have no gradients."""
    trains_vision: bool = False
    """The part of the model that reads images is trained too."""
    trains_ends: bool = False
    """Embeddings and head are trained beside adapters, in copies of their own (peft's ``modules_to_save``)."""
    adapter_inputs: float = 0
    """Bytes of a value in the copy of an adapted layer's input that is made in the adapter's type; 0: there is none."""
    offloads_activations: bool = False
    """Layers save their activations for the backward pass in host memory."""
    layers_per_checkpoint: int = 1
    """Layers that are recomputed from one saved input, with gradient checkpointing."""
    fused_layers: bool = False
    """Norms and activations are fused (Transformer Engine) and save less for the backward pass."""
    shards_norms: bool = False
    """Tensor-parallel ranks also shard what is between their products: Megatron's sequence parallelism."""
    fused_loss: bool = False
    """Logits are computed and used in chunks as large as the hidden states (Liger's kernel)."""
    logits_at_once: float = float("inf")
    """The most logits that exist at a time; they are computed again for the backward pass."""
    logits: float = 14
    """Bytes of a logit at the peak of the loss. In transformers: bf16, their log-softmax in fp32, and two gradients."""
    step: float = 0
    """Temporary bytes of a parameter in the optimizer step, for at most ``step_parameters`` at a time."""
    step_parameters: float = float("inf")
    live_parameters: float | None = None
    """Parameters that ZeRO stage 3 gathers at a time. None: as FSDP, a layer and the next one; embedding and head
    always."""
    bucket_elements: float = 0
    """Gradients that are reduced together. A larger tensor is reduced by itself."""
    reduce_bytes: tuple[float, float, float, float] = (0, 2, 2, 0)
    """By ZeRO stage, bytes of each gradient in that reduction: its place in a temporary bucket, and its copies."""
    keeps_gradients: bool = True
    """The buffers of gradients stay allocated between steps."""
    offloads_gradients_from: int = 1
    """The first ZeRO stage in which gradients go to the host with the optimizer; 4: none."""


MIXED_PRECISION = TrainingMemory()
"""Weights and gradients in bf16, the optimizer in fp32."""


@dataclass(frozen=True)
class Stage:
    """One GPU's part of a pipeline stage, in numbers of parameters before ZeRO shards its state."""

    num_layers: int
    in_flight: int
    """Micro-batches whose activations it holds (Korthikanti et al. 2022, section 4.2.3)."""
    dense: float
    experts: float
    ends: float
    """Embedding and output head, as far as the stage has them; included in ``dense``."""
    head: float
    """The output head; 0 where the stage computes no logits."""
    layer: float
    """The largest layer."""


def pipeline_stages(model: Architecture, layout: Layout) -> Iterator[Stage]:
    """Yield the first and the last stage, one of which is the fullest.

    Without pipeline parallelism they are the same.
    """
    tensor, experts = layout.tensor_parallel_size, layout.expert_parallel_size
    count = layout.pipeline_parallel_size
    embedding, head = model.embedding_parameters / tensor, model.head_parameters / tensor
    output = model.output_parameters / tensor
    sparse = model.num_sparse_layers
    # Tensor parallelism cuts experts only where they are not spread over GPUs of their own.
    expert_layer = model.num_expert_parameters / max(1, sparse) / (experts if experts > 1 else tensor)
    between = model.num_parameters - model.embedding_parameters - model.head_parameters - model.num_expert_parameters
    dense_layer = between / model.num_hidden_layers / tensor
    per_stage = ceil(model.num_hidden_layers / count)
    for last in (False, True) if count > 1 else (True,):
        layers = per_stage if not last else max(1, model.num_hidden_layers - per_stage * (count - 1))
        ends = embedding + head if count == 1 else output if last else embedding
        yield Stage(
            num_layers=layers,
            in_flight=1 if last else count,
            dense=dense_layer * layers + ends,
            experts=expert_layer * min(sparse, ceil(layers * sparse / model.num_hidden_layers)),
            ends=ends,
            head=output if last else 0,
            layer=max(dense_layer + (expert_layer if sparse else 0), 0),
        )


def state_terms(model: Architecture, layout: Layout, training: TrainingMemory) -> dict[str, float]:
    """Return weights, gradients and optimizer of a trained role on its fullest GPU (Rajbhandari et al. 2020, figure 1).

    The state is sharded over data- and sequence-parallel ranks: gradients from stage 2, weights in stage 3.
    """
    return max((stage_state(model, layout, training, stage) for stage in pipeline_stages(model, layout)), key=total_gib)


def stage_state(model: Architecture, layout: Layout, training: TrainingMemory, stage: Stage) -> dict[str, float]:
    """Return the terms of ``state_terms`` for one pipeline stage."""
    zero = layout.zero_stage or 0
    shards_gradients = zero >= 2 and not layout.reduces_once
    whole = stage.dense + stage.experts
    sharded = sharded_parameters(layout, stage)
    sizes = {"weights": training.weights, "gradients": training.gradients, "optimizer": training.optimizer}
    frozen = 0.0
    trained, trained_sharded = whole, sharded
    if training.lora is not None:
        frozen = training.weights * (sharded if zero == 3 else whole)
        trained = adapter_parameters(model, training.lora) * stage.num_layers / model.num_hidden_layers
        trained /= layout.tensor_parallel_size
        trained_sharded = trained * sharded / whole
        sizes = _ADAPTER_BYTES
    ends = dict.fromkeys(sizes, 0.0)
    if training.lora is not None and training.trains_ends:
        parts = stage.ends * sharded / whole
        ends = {
            "weights": training.weights * (parts if zero == 3 else stage.ends),
            "gradients": training.gradients * (parts if shards_gradients else stage.ends),
            "optimizer": training.optimizer * (parts if zero >= 1 else stage.ends),
        }
    # Encoders are whole on every tensor-parallel rank.
    if training.trains_vision:
        trained += model.num_encoder_parameters
        trained_sharded += model.num_encoder_parameters / layout.num_shards
    else:
        frozen += training.weights * frozen_encoder_parameters(model, layout)
    terms = {
        "weights": frozen + ends["weights"] + sizes["weights"] * (trained_sharded if zero == 3 else trained),
        "gradients": ends["gradients"] + sizes["gradients"] * (trained_sharded if shards_gradients else trained),
        "optimizer": ends["optimizer"] + sizes["optimizer"] * (trained_sharded if zero >= 1 else trained),
    }
    if layout.offload in ("optimizer", "weights"):
        terms["optimizer"] = 0.0
        terms["gradients"] *= 0 if zero >= training.offloads_gradients_from else 1
    if layout.offload == "weights":
        terms["weights"] = 0.0
    return {name: size / GIB for name, size in terms.items()}


def frozen_encoder_parameters(model: Architecture, layout: Layout) -> float:
    """Return the parameters of frozen encoders on a GPU: ZeRO 3 shards them, and the engine with replicas does not."""
    is_sharded = layout.zero_stage == 3 and layout.num_replicas is None
    return model.num_encoder_parameters / (layout.num_shards if is_sharded else 1)


def persistent_buffers(layout: Layout, training: TrainingMemory) -> dict[str, float]:
    """Return what a library holds on the GPU from step to step besides the state.

    In DeepSpeed's stage 3 that is a bucket for gradients (runtime/zero/stage3.py, IPGBucketZ3).
    """
    if layout.zero_stage != 3 or training.live_parameters is None:
        return {}
    return {"buckets": training.gradients * training.bucket_elements / GIB}


def sharded_parameters(layout: Layout, stage: Stage) -> float:
    """Return the number of parameters whose state one GPU holds when it is sharded."""
    shards = layout.num_shards
    if layout.expert_parallel_size == 1:
        return (stage.dense + stage.experts) / shards
    return stage.dense / shards + stage.experts / max(
        1.0, shards * layout.tensor_parallel_size / layout.expert_parallel_size
    )


def total_gib(terms: Terms) -> float:
    """Return the sum of all terms."""
    return sum(terms.values())


def layer_bytes(model: Architecture, layout: Layout, training: TrainingMemory, tokens: float) -> tuple[float, float]:
    """Return a layer's bytes while its gradients are computed, and the bytes saved for it until then.

    With gradient checkpointing these are those of a layer that is recomputed.
    """
    tensor = layout.tensor_parallel_size
    around = tensor if training.shards_norms else 1
    layers = []
    for kind in model.layer_kinds:
        bytes_ = layer_activations(model, kind, fused=training.fused_layers)
        everything = tokens * (bytes_.whole / around + bytes_.split / tensor)
        if training.lora is not None:
            inputs = adapter_inputs(model, training.lora, kind)
            everything += tokens * training.adapter_inputs * inputs / tensor
        # The gradient that goes through the MLP's product, or through the states of a recurrence.
        gradient = tokens * 2 * max(kind.mlp_width, 4 * kind.output if kind.recurrent else 0) / tensor
        layers.append((kind.count, everything, gradient))
    if layout.gradient_checkpointing:
        largest = max(everything + gradient for _, everything, gradient in layers)
        saved = tokens * 2 * model.hidden_size / around / training.layers_per_checkpoint
        return _recomputed_at_once(layout, training) * largest, saved
    mean = sum(count * everything for count, everything, _ in layers) / model.num_hidden_layers
    return max(gradient for _, _, gradient in layers), mean


def _recomputed_at_once(layout: Layout, training: TrainingMemory) -> int:
    """Return how many layers are recomputed at a time with checkpointing.

    FSDP with frozen weights has two: 4096 tokens more take 3.0 GiB for Mistral 7B with adapters on 2 or 4 GPUs and 2.1
    on one, of which the inputs of all layers are 1.0 (fms-acceleration). prime-rl's benchmarks agree.
    """
    is_fsdp = layout.zero_stage == 3 and training.live_parameters is None and layout.num_shards > 1
    return max(2 if is_fsdp and training.lora is not None else 1, training.layers_per_checkpoint)
