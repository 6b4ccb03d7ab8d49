"""How many parameters the parts of a model have.

Source: the module shapes of transformers' ...ForCausalLM classes, whose names are the model types'. Counted are the
weights of the file, so DeepSeek's correction of the router's scores too, which transformers holds as a buffer.
"""

from dataclasses import dataclass
from typing import Literal

from rlflow.resources.models.figures import Figures


@dataclass(frozen=True, kw_only=True)
class _Traits:
    """Where a model type differs from llama's class."""

    qkv_bias: Literal["always", "never", "as written"] = "as written"
    """The last by ``attention_bias``."""
    output_bias: bool = True
    """The output projection has one if q, k and v do."""
    head_norms: bool = False
    """A norm each on the heads of q and k."""
    norms: int = 2
    """Of a layer."""
    norm_vectors: int = 1
    """Two where a norm has a bias."""
    mlp_matrices: int = 3
    """Two without a gate."""
    mlp_bias: bool = False
    """In experts as well."""
    sinks: bool = False
    """A logit a head that takes attention from all tokens."""
    router_bias: bool = False
    shared_gate: bool = False
    """A vector that weighs the shared expert."""
    learned_positions: int | None = None
    """Beside ``max_position_embeddings``, so many."""


_LLAMA = _Traits()
_TRAITS = {
    "deepseek_v3": _Traits(router_bias=True),
    "gemma2": _Traits(norms=4),
    "gemma3_text": _Traits(norms=4, head_norms=True),
    "glm4": _Traits(norms=4, output_bias=False),
    "gpt_oss": _Traits(sinks=True, mlp_bias=True, router_bias=True),
    "mistral": _Traits(qkv_bias="never"),
    "mixtral": _Traits(qkv_bias="never"),
    "opt": _Traits(qkv_bias="always", norm_vectors=2, mlp_matrices=2, mlp_bias=True, learned_positions=2),
    "phi3": _Traits(qkv_bias="never"),
    "qwen2": _Traits(qkv_bias="always", output_bias=False),
    "qwen2_moe": _Traits(qkv_bias="always", output_bias=False, shared_gate=True),
    "qwen3": _Traits(head_norms=True),
    "qwen3_moe": _Traits(head_norms=True),
}


def layer(of: Figures, *, sparse: bool) -> int:
    """One decoder layer, with all its experts if ``sparse``."""
    norms = _traits(of).norms * norm(of)
    if not sparse:
        return attention(of) + norms + _mlp(of, of.intermediate_size)
    return attention(of) + norms + (of.num_experts or 0) * expert(of) + _router(of) + _shared(of)


def attention(of: Figures) -> int:
    """Projections of queries, keys, values and output, their biases, the norms on heads."""
    traits = _traits(of)
    if of.kv_lora_rank:
        return _latent_attention(of, of.kv_lora_rank)
    count = of.hidden_size * (of.query_width + of.key_value_width + of.output_width)
    if traits.qkv_bias == "always" or (traits.qkv_bias == "as written" and of.attention_bias):
        count += of.query_width + of.key_value_width + (of.hidden_size if traits.output_bias else 0)
    if traits.head_norms:
        count += 2 * of.head_dim
    return count + (of.num_attention_heads if traits.sinks else 0)


def _latent_attention(of: Figures, rank: int) -> int:
    """Queries by a narrow middle if ``q_lora_rank`` is given; keys and values by one of ``rank``, with one rotated key
    for all heads beside it. A norm in either middle."""
    cached = rank + (of.qk_rope_head_dim or 0)
    values = of.output_width
    keys = of.num_attention_heads * (of.qk_nope_head_dim or 0)
    count = of.hidden_size * (cached + values) + rank * (1 + keys + values)
    count += (cached + of.hidden_size) if of.attention_bias else 0
    if of.q_lora_rank is None:
        return count + of.hidden_size * of.query_width
    count += of.q_lora_rank * (of.hidden_size + 1 + of.query_width)
    return count + (of.q_lora_rank if of.attention_bias else 0)


def expert(of: Figures) -> int:
    """One routed expert."""
    return _mlp(of, of.expert_width)


def largest_tensor(of: Figures) -> int:
    """Return the size of the largest tensor of transformers' classes, which keep a layer's experts in one."""
    dense = 0 if of.num_sparse_layers == of.num_hidden_layers else of.hidden_size * of.intermediate_size
    experts = (of.num_experts or 0) * (_traits(of).mlp_matrices - 1) * of.hidden_size * of.expert_width
    return max(of.vocab_size * of.hidden_size, dense, experts)


def norm(of: Figures) -> int:
    """One that has the model's width."""
    return of.hidden_size * _traits(of).norm_vectors


def positions(of: Figures) -> int:
    """Their embeddings, where they are learned."""
    extra = _traits(of).learned_positions
    return 0 if extra is None else (of.max_position_embeddings + extra) * of.hidden_size


def _mlp(of: Figures, width: int) -> int:
    traits = _traits(of)
    bias = (traits.mlp_matrices - 1) * width + of.hidden_size if traits.mlp_bias else 0
    return traits.mlp_matrices * of.hidden_size * width + bias


def _router(of: Figures) -> int:
    return (of.num_experts or 0) * (of.hidden_size + (1 if _traits(of).router_bias else 0))


def _shared(of: Figures) -> int:
    width = of.shared_expert_intermediate_size
    return _mlp(of, width) + (of.hidden_size if _traits(of).shared_gate else 0) if width else 0


def _traits(of: Figures) -> _Traits:
    return _TRAITS.get(of.model_type, _LLAMA)
