"""The activations of a layer, with flash attention in bf16, and what of them waits for the backward pass."""

from dataclasses import dataclass

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.figures import Recurrent
from rlflow.resources.models.layers import LayerKind, traits_of
from rlflow.resources.models.lora import adapter_inputs

# Bytes of a value of the hidden state while the gradient of a norm is computed, in fp32.
_NORM_GRADIENT = 19.5


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


def layer_bytes(model: Architecture, layout: Layout, training: TrainingMemory, tokens: float) -> tuple[float, float]:
    """Return a layer's bytes while its gradients are computed, and the bytes saved for it until then.

    With gradient checkpointing these are those of a layer that is recomputed.
    """
    tensor = layout.tensor_parallel_size
    around = tensor if training.shards_norms else 1
    copies = copied_bytes(model, layout, training, tokens)
    merged = training.merged_experts * model.num_expert_parameters / max(1, model.num_sparse_layers)
    layers = []
    for kind in model.layer_kinds:
        bytes_ = layer_activations(model, kind, fused=training.fused_layers)
        everything = tokens * (bytes_.whole / around + bytes_.split / tensor)
        # Experts on other GPUs save 3.5 copies, and need five while gradients come back: measured with torch's tracker
        # (benchmarks/parallel/memory.py). Experts on the same GPU save two, on each tensor-parallel rank.
        everything += (3.5 - 2 * tensor) * copies * kind.sparse
        if training.lora is not None:
            inputs = adapter_inputs(model, training.lora, kind)
            everything += tokens * training.adapter_inputs * inputs / tensor + merged * kind.sparse
        # The gradient that goes through the MLP's product, or through the states of a recurrence.
        gradient = tokens * 2 * max(kind.mlp_width, 4 * kind.output if kind.recurrent else 0) / tensor
        # Experts that adapters were added to have gradients, from which those of the adapters follow.
        gradient += (1.5 * copies + merged) * kind.sparse
        if training.gathers_apart and tensor > 1:
            # After the MLP, that of its norm, which every rank computes as a whole.
            of_mlp = tokens * 8 * kind.mlp_width / tensor + 3 * copies * kind.sparse
            gradient = max(gradient, tokens * _NORM_GRADIENT * model.hidden_size - of_mlp)
        layers.append((kind.count, everything, gradient))
    if layout.gradient_checkpointing:
        largest = max(everything + gradient for _, everything, gradient in layers)
        saved = tokens * 2 * model.hidden_size / around / training.layers_per_checkpoint
        return _recomputed_at_once(layout, training) * largest, saved
    mean = sum(count * everything for count, everything, _ in layers) / model.num_hidden_layers
    return max(gradient for _, _, gradient in layers), mean


def copied_bytes(model: Architecture, layout: Layout, training: TrainingMemory, tokens: float) -> float:
    """Return the bytes of one copy of all tokens for each of their experts, on a rank; 0 where no rank sends any."""
    if not training.gathers_apart or layout.expert_parallel_size == 1:
        return 0.0
    width = (model.moe_latent_size or model.hidden_size) * (model.num_experts_per_tok or 0)
    return tokens * 2 * width / layout.tensor_parallel_size


def _recomputed_at_once(layout: Layout, training: TrainingMemory) -> int:
    """Return how many layers are recomputed at a time with checkpointing.

    FSDP with frozen weights has two: 4096 tokens more take 3.0 GiB for Mistral 7B with adapters on 2 or 4 GPUs and 2.1
    on one, of which the inputs of all layers are 1.0 (fms-acceleration). prime-rl's benchmarks agree.
    """
    is_fsdp = layout.zero_stage == 3 and training.live_parameters is None and layout.num_shards > 1
    return max(2 if is_fsdp and training.lora is not None else 1, training.layers_per_checkpoint)
