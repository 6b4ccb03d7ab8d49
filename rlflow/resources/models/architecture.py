"""A model's architecture: its figures, and how many parameters each of its parts has.

Source of the counts: the module shapes of transformers' ...ForCausalLM classes, one for each model type. The counts are
of the weights in the file, so they include DeepSeek's correction of the router scores, a buffer in transformers.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from rlflow.resources.models.figures import Figures


def heads_divide(heads: int, key_value_heads: int, size: int) -> bool:
    """Return whether ``size`` ranks can share the heads evenly; a rank holds whole key-value heads or a copy of one."""
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


@dataclass(frozen=True, kw_only=True)
class Architecture(Figures):
    """The figures of a decoder-only transformer, with the number of parameters of each kind."""

    @cached_property
    def num_parameters(self) -> int:
        """Return the parameters of embeddings, layers, last norm and head."""
        sparse = self.num_sparse_layers
        layers = (self.num_hidden_layers - sparse) * _layer(self, sparse=False)
        layers += sparse * _layer(self, sparse=True) if sparse else 0
        return self.embedding_parameters + layers + _norm(self) + self.head_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        """Return the parameters that one token uses: all except the routed experts that it is not sent to."""
        if not self.num_experts or not self.num_experts_per_tok:
            return self.num_parameters
        idle = self.num_experts - self.num_experts_per_tok
        return self.num_parameters - self.num_sparse_layers * idle * _expert(self)

    @cached_property
    def num_expert_parameters(self) -> int:
        """Return the parameters of all routed experts of all layers, without routers and shared experts."""
        return self.num_sparse_layers * (self.num_experts or 0) * _expert(self)

    @cached_property
    def embedding_parameters(self) -> int:
        """Return the parameters of token embeddings and learned position embeddings; a tied head uses them too."""
        return self.vocab_size * self.hidden_size + _positions(self)

    @cached_property
    def head_parameters(self) -> int:
        """Return the parameters of the output head, or 0 where it is tied to the embeddings."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @cached_property
    def num_outputs(self) -> int:
        """Return how many numbers the head computes for a token."""
        return self.vocab_size

    @cached_property
    def layer_parameters(self) -> int:
        """Return the parameters of the largest layer, with all its experts."""
        dense = _layer(self, sparse=False) if self.num_sparse_layers < self.num_hidden_layers else 0
        return max(dense, _layer(self, sparse=True) if self.num_sparse_layers else 0)

    @cached_property
    def largest_tensor(self) -> int:
        """Return the size of the largest tensor; transformers keeps all experts of a layer in one tensor."""
        dense = 0 if self.num_sparse_layers == self.num_hidden_layers else self.hidden_size * self.intermediate_size
        experts = (self.num_experts or 0) * (_traits(self).mlp_matrices - 1) * self.hidden_size * self.expert_width
        return max(self.vocab_size * self.hidden_size, dense, experts)

    @cached_property
    def largest_module(self) -> int:
        """Return the parameters of the largest part that vLLM loads at once: embedding, head, or a layer's experts."""
        experts = (self.num_experts or 0) * _expert(self) if self.num_sparse_layers else 0
        return max(self.largest_tensor, experts)

    @cached_property
    def num_tensors(self) -> int:
        """Return about how many tensors the weights' file has: nine for each layer, and three for each expert."""
        return 9 * self.num_hidden_layers + 3 * self.num_sparse_layers * (self.num_experts or 0)


@dataclass(frozen=True, kw_only=True)
class ScalarModel(Architecture):
    """A model whose head gives one number for each token, a value or a reward, and no logits.

    Its head is a vector and a bias, as in transformers' ...ForTokenClassification classes with one label. The head of a
    reward model has no bias; the difference is ignored.
    """

    @cached_property
    def num_outputs(self) -> int:
        """Return how many numbers the head computes for a token."""
        return 1

    @cached_property
    def head_parameters(self) -> int:
        """Return the parameters of the scalar head."""
        return self.hidden_size + 1


def with_scalar_head(model: Architecture) -> ScalarModel:
    """Return the same layers with a scalar head."""
    return ScalarModel(**{field.name: getattr(model, field.name) for field in fields(model)})


@dataclass(frozen=True, kw_only=True)
class _Traits:
    """The differences between a model type and llama's class."""

    qkv_bias: Literal["always", "never", "from config"] = "from config"
    """``from config`` reads ``attention_bias``."""
    output_bias: bool = True
    """The output projection has a bias if q, k and v have one."""
    head_norms: bool = False
    """The heads of q and of k have a norm each."""
    norms: int = 2
    """Norms in a layer."""
    norm_vectors: int = 1
    """Vectors in a norm: two where it has a bias."""
    mlp_matrices: int = 3
    """Matrices in an MLP: two without a gate."""
    mlp_bias: bool = False
    """MLPs have biases, those of experts too."""
    sinks: bool = False
    """Each head has a logit that takes attention from all tokens."""
    router_bias: bool = False
    shared_gate: bool = False
    """A vector weighs the output of the shared expert."""
    learned_positions: int | None = None
    """Learned position embeddings, in addition to ``max_position_embeddings``; None: positions are not learned."""


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


def _traits(of: Figures) -> _Traits:
    return _TRAITS.get(of.model_type, _LLAMA)


def _layer(of: Figures, *, sparse: bool) -> int:
    """Count one decoder layer, with all its experts if ``sparse``."""
    norms = _traits(of).norms * _norm(of)
    if not sparse:
        return _attention(of) + norms + _mlp(of, of.intermediate_size)
    return _attention(of) + norms + (of.num_experts or 0) * _expert(of) + _router(of) + _shared_expert(of)


def _attention(of: Figures) -> int:
    """Count the projections of queries, keys, values and output, their biases, and the norms on heads."""
    traits = _traits(of)
    if of.kv_lora_rank:
        return _latent_attention(of, of.kv_lora_rank)
    count = of.hidden_size * (of.query_width + of.key_value_width + of.output_width)
    if traits.qkv_bias == "always" or (traits.qkv_bias == "from config" and of.attention_bias):
        count += of.query_width + of.key_value_width + (of.hidden_size if traits.output_bias else 0)
    if traits.head_norms:
        count += 2 * of.head_dim
    return count + (of.num_attention_heads if traits.sinks else 0)


def _latent_attention(of: Figures, rank: int) -> int:
    """Count DeepSeek's latent attention.

    Keys and values come from a latent of ``rank`` values, with one rotated key for all heads beside it; queries come
    from a latent too where ``q_lora_rank`` is given. Each latent has a norm.
    """
    cached = rank + (of.qk_rope_head_dim or 0)
    values = of.output_width
    keys = of.num_attention_heads * (of.qk_nope_head_dim or 0)
    count = of.hidden_size * (cached + values) + rank * (1 + keys + values)
    count += (cached + of.hidden_size) if of.attention_bias else 0
    if of.q_lora_rank is None:
        return count + of.hidden_size * of.query_width
    count += of.q_lora_rank * (of.hidden_size + 1 + of.query_width)
    return count + (of.q_lora_rank if of.attention_bias else 0)


def _expert(of: Figures) -> int:
    """Count one routed expert."""
    return _mlp(of, of.expert_width)


def _norm(of: Figures) -> int:
    """Count one norm of the model's width."""
    return of.hidden_size * _traits(of).norm_vectors


def _positions(of: Figures) -> int:
    """Count the position embeddings, where they are learned."""
    extra = _traits(of).learned_positions
    return 0 if extra is None else (of.max_position_embeddings + extra) * of.hidden_size


def _mlp(of: Figures, width: int) -> int:
    traits = _traits(of)
    bias = (traits.mlp_matrices - 1) * width + of.hidden_size if traits.mlp_bias else 0
    return traits.mlp_matrices * of.hidden_size * width + bias


def _router(of: Figures) -> int:
    return (of.num_experts or 0) * (of.hidden_size + (1 if _traits(of).router_bias else 0))


def _shared_expert(of: Figures) -> int:
    width = of.shared_expert_intermediate_size
    return _mlp(of, width) + (of.hidden_size if _traits(of).shared_gate else 0) if width else 0
