"""Bytes that a token leaves behind in a model's forward pass, with flash attention and in bf16."""

from dataclasses import dataclass

from rlflow.resources.models.architecture import Architecture

_NORMS_OF_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")


@dataclass(frozen=True)
class LayerActivations:
    """Of one token in one layer, that its backward pass needs, in bytes."""

    whole: float
    """Of the width of the hidden state: every tensor-parallel rank has them, unless its norms are sharded too."""
    split: float
    """Of heads and of the MLP's width, which tensor parallelism divides."""


def layer_activations(model: Architecture, *, fused: bool) -> LayerActivations:
    """After Korthikanti et al. 2022, section 4.1, for gated MLPs and grouped queries, without dropout.

    ``fused``: kernels of Transformer Engine and Megatron. Else the operations of transformers one by one; the tensors
    that torch's tracker counts there for Qwen2 are exactly these (benchmarks/fsdp_memory.py).
    """
    hidden, queries, output, keys = model.hidden_size, model.query_width, model.output_width, model.key_value_width
    # Query, keys, values and output of the attention; its log-sum-exp.
    split: float = 2 * (queries + keys + output) + 4 * model.num_attention_heads
    norms = 4 if model.model_type in _FOUR_NORMS else 2
    if fused:
        # A norm's input and output; of the MLP gate, up and their product.
        whole = norms * 4 * hidden
        split += 6 * model.mlp_width
    else:
        # A norm's input in fp32, what it is normalised to, and its output; the activation of the gate besides.
        whole = norms * 8 * hidden
        split += 8 * model.mlp_width
        if model.model_type in _NORMS_OF_HEADS:
            split += 6 * (queries + keys / 2)
    if model.num_experts_per_tok:
        # The token is copied for each of its experts, and each gives its output.
        whole += 4 * hidden * model.num_experts_per_tok
    return LayerActivations(whole, split)
