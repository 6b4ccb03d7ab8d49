"""The state of a trained model: how a library keeps weights, gradients and optimizer, and what one GPU holds of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import Lora, adapter_parameters

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
    muon: bool = False
    """The matrices of the layers have one moment of four bytes, and an update needs a whole one (Muon)."""
    trains_ends: bool = False
    """Embeddings and head are trained beside adapters, in copies of their own (peft's ``modules_to_save``)."""
    adapter_inputs: float = 0
    """Bytes of a value in the copy of an adapted layer's input that is made in the adapter's type; 0: there is none."""
    merged_experts: float = 0
    """Bytes of a parameter in a copy of a layer's experts that a pass adds adapters to; 0: there is none."""
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
    gathers_apart: bool = False
    """Embedding and head are gathered one by one and only while they compute, unless they are tied. So are experts that
    are spread over GPUs."""
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
    experts_layer: float
    """The experts of a layer; included in ``layer``."""


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
            experts_layer=expert_layer if sparse else 0,
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
    if training.muon:
        terms["optimizer"] -= 4 * (sharded if zero >= 1 else whole) * (1 - stage.ends / whole)
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
