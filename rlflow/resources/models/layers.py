"""The kinds of layers that a model has, with the parameters and the widths of each.

Source of the counts: the module shapes of transformers' ...ForCausalLM classes, one for each model type. The counts are
of the weights in the file, so they include DeepSeek's correction of the router scores, a buffer in transformers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rlflow.resources.models.figures import Figures, Recurrent


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are built alike, with the number of values that a token has between their matrices."""

    count: int
    parameters: int = 0
    """The parameters of one layer, with all its experts."""
    num_norms: int = 0
    queries: int = 0
    """Values of a token's queries; 0: no attention."""
    gate: int = 0
    """Values of a token that gate the attention's output, and come from the projection of queries."""
    keys: int = 0
    """Values of a token's keys and values in attention."""
    output: int = 0
    """Values that attention or a recurrence yields for a token."""
    recurrent: Recurrent | None = None
    mlp_width: int = 0
    """Values between the projections of an MLP or of a token's experts; 0: the layer has neither."""
    sparse: bool = False


def layer_kinds(of: Figures) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of a model; their counts add up to its layers."""
    mixers, mlps = _mixers(of), _mlps(of)
    traits = traits_of(of)
    norms = traits.norms * norm_parameters(of)
    if of.num_mlp_layers:
        return tuple(replace(kind, parameters=kind.parameters + norms, num_norms=1) for kind in (*mixers, *mlps))
    kinds = []
    # Only counts are known, not positions: the first MLPs are paired with the most frequent mixers.
    left = {index: mixer.count for index, mixer in enumerate(mixers)}
    for mlp in mlps:
        wanted = mlp.count
        for index, mixer in enumerate(mixers):
            count = min(wanted, left[index])
            left[index] -= count
            wanted -= count
            if count:
                kinds.append(
                    replace(
                        mixer,
                        count=count,
                        parameters=mixer.parameters + mlp.parameters + norms,
                        num_norms=traits.norms,
                        mlp_width=mlp.mlp_width,
                        sparse=mlp.sparse,
                    )
                )
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The differences between a model type and llama's class."""

    qkv_bias: Literal["always", "never", "from config"] = "from config"
    """``from config`` reads ``attention_bias``."""
    output_bias: bool = True
    """The output projection has a bias if q, k and v have one."""
    head_norms: Literal["head", "all", ""] = ""
    """Queries and keys have a norm each, over a head or over all heads."""
    gated_output: bool = False
    """The query projection also yields a gate for the attention's output."""
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
    recurrence: Literal["mamba", "delta", "convolution", ""] = ""
    """The class of recurrent layers."""


_LLAMA = Traits()
_TRAITS = {
    "deepseek_v3": Traits(router_bias=True),
    "gemma2": Traits(norms=4),
    "gemma3_text": Traits(norms=4, head_norms="head"),
    "gemma4_text": Traits(norms=4, head_norms="head"),
    "glm4": Traits(norms=4, output_bias=False),
    "gpt_oss": Traits(sinks=True, mlp_bias=True, router_bias=True),
    "granitemoehybrid": Traits(recurrence="mamba"),
    "lfm2": Traits(head_norms="head", recurrence="convolution"),
    "lfm2_moe": Traits(head_norms="head", router_bias=True, recurrence="convolution"),
    "mistral": Traits(qkv_bias="never"),
    "mixtral": Traits(qkv_bias="never"),
    "nemotron_h": Traits(qkv_bias="never", norms=1, mlp_matrices=2, router_bias=True, recurrence="mamba"),
    "olmo_hybrid": Traits(head_norms="all", recurrence="delta"),
    "opt": Traits(qkv_bias="always", norm_vectors=2, mlp_matrices=2, mlp_bias=True, learned_positions=2),
    "phi3": Traits(qkv_bias="never"),
    "qwen2": Traits(qkv_bias="always", output_bias=False),
    "qwen2_moe": Traits(qkv_bias="always", output_bias=False, shared_gate=True),
    "qwen3": Traits(head_norms="head"),
    "qwen3_5_text": Traits(head_norms="head", gated_output=True, recurrence="delta"),
    "qwen3_5_moe_text": Traits(head_norms="head", gated_output=True, shared_gate=True, recurrence="delta"),
    "qwen3_moe": Traits(head_norms="head"),
    "qwen3_next": Traits(head_norms="head", gated_output=True, shared_gate=True, recurrence="delta"),
}


def traits_of(of: Figures) -> Traits:
    """Return the traits of a model's type."""
    return _TRAITS.get(of.model_type, _LLAMA)


def norm_parameters(of: Figures) -> int:
    """Return the parameters of one norm of the model's width."""
    return of.hidden_size * traits_of(of).norm_vectors


def expert_parameters(of: Figures) -> int:
    """Return the parameters of one routed expert."""
    return _mlp_parameters(of, of.expert_width, of.moe_latent_size or of.hidden_size)


def _mixers(of: Figures) -> list[LayerKind]:
    """Return the kinds of attention and recurrence, the most frequent one first; parameters without norms of layers."""
    kinds = []
    if of.recurrent is not None:
        kinds.append(
            LayerKind(
                count=of.recurrent.num_layers,
                parameters=_recurrence(of, of.recurrent),
                output=of.recurrent.value_width,
                recurrent=of.recurrent,
            )
        )
    if of.model_type == "gemma4_text":
        kinds += _gemma4_attention(of)
    elif of.num_attention_layers:
        kinds.append(
            LayerKind(
                count=of.num_attention_layers,
                parameters=_attention(of),
                queries=of.query_width,
                gate=of.output_width if traits_of(of).gated_output else 0,
                keys=of.key_value_width,
                output=of.output_width,
            )
        )
    return sorted(kinds, key=lambda kind: -kind.count)


def _mlps(of: Figures) -> list[LayerKind]:
    """Return the kinds of MLPs and experts, in the order of layers; parameters without norms of layers."""
    sparse, width = of.num_sparse_layers, of.intermediate_size
    dense = (of.num_mlp_layers or of.num_hidden_layers) - sparse
    wide = of.num_kv_shared_layers if of.use_double_wide_mlp else 0
    kinds = [
        LayerKind(count=dense - wide, parameters=_mlp_parameters(of, width), mlp_width=width),
        LayerKind(count=wide, parameters=_mlp_parameters(of, 2 * width), mlp_width=2 * width),
    ]
    if of.num_experts:
        experts = of.num_experts * expert_parameters(of) + _router(of) + _shared_expert(of) + _latents(of)
        kinds.append(LayerKind(count=sparse, parameters=experts, mlp_width=of.sparse_width, sparse=True))
    return [kind for kind in kinds if kind.count]


def _attention(of: Figures) -> int:
    """Count the projections of queries, keys, values and output, their biases, and the norms on heads."""
    traits = traits_of(of)
    if of.kv_lora_rank:
        return _latent_attention(of, of.kv_lora_rank)
    queries = of.query_width + (of.output_width if traits.gated_output else 0)
    count = of.hidden_size * (queries + of.key_value_width + of.output_width)
    if traits.qkv_bias == "always" or (traits.qkv_bias == "from config" and of.attention_bias):
        count += queries + of.key_value_width + (of.hidden_size if traits.output_bias else 0)
    count += {"head": 2 * of.head_dim, "all": of.query_width + of.key_value_width // 2, "": 0}[traits.head_norms]
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


def _gemma4_attention(of: Figures) -> list[LayerKind]:
    """Return Gemma 4's kinds: with and without a window, with keys and values of their own or shared.

    The layers with shared ones have windows as often as all layers. What a layer mixes in from embeddings of its own,
    and its scalar, are counted here, too.
    """
    embedding = of.hidden_size_per_layer_input
    mixed_in = of.hidden_size * (2 * embedding + 1) + 1 if embedding else 1
    kinds = []
    for windowed, layers in ((True, of.num_windowed_layers), (False, of.num_hidden_layers - of.num_windowed_layers)):
        shared = of.num_kv_shared_layers * layers // of.num_hidden_layers
        size = of.head_dim if windowed else of.global_head_dim or of.head_dim
        queries = of.num_attention_heads * size
        keys = of.key_value_width if windowed else of.global_key_value_width
        projected = keys if windowed or not of.attention_k_eq_v else keys // 2
        for count, matrices, norms in ((layers - shared, projected, 2), (shared, 0, 1)):
            parameters = of.hidden_size * (2 * queries + matrices) + norms * size + mixed_in
            kinds.append(LayerKind(count=count, parameters=parameters, queries=queries, keys=keys, output=queries))
    return [kind for kind in kinds if kind.count]


def _recurrence(of: Figures, recurrent: Recurrent) -> int:
    """Count projections, convolution, decays and the norm of the output of a recurrent layer."""
    recurrence, heads = traits_of(of).recurrence, recurrent.num_heads
    values, convolved = recurrent.value_width, 2 * recurrent.key_width + recurrent.value_width
    projections = of.hidden_size * (recurrent.projected_width + values)
    if recurrence == "mamba":
        # The step has a weight for each head; decay, its bias and the share of the input a number each.
        return projections + of.hidden_size * heads + convolved * (recurrent.conv_kernel + 1) + 3 * heads + values
    if recurrence == "delta":
        return (
            projections
            + 2 * of.hidden_size * heads
            + convolved * recurrent.conv_kernel
            + 2 * heads
            + recurrent.head_dim
        )
    return projections + convolved * recurrent.conv_kernel


def _mlp_parameters(of: Figures, width: int, outside: int = 0) -> int:
    """Count an MLP whose input and output have ``outside`` values, by default those of the model."""
    outside = outside or of.hidden_size
    bias = (traits_of(of).mlp_matrices - 1) * width + outside if traits_of(of).mlp_bias else 0
    return traits_of(of).mlp_matrices * outside * width + bias


def _router(of: Figures) -> int:
    return (of.num_experts or 0) * (of.hidden_size + (1 if traits_of(of).router_bias else 0))


def _shared_expert(of: Figures) -> int:
    width = of.shared_expert_intermediate_size
    return _mlp_parameters(of, width) + (of.hidden_size if traits_of(of).shared_gate else 0) if width else 0


def _latents(of: Figures) -> int:
    """Count the projections to what routed experts see and back, and what Gemma 4 has beside its experts."""
    if of.model_type == "gemma4_text":
        # A dense MLP, three more norms, and scales of the router for each input and each expert.
        return _mlp_parameters(of, of.intermediate_size) + 4 * of.hidden_size + (of.num_experts or 0)
    return 2 * of.hidden_size * of.moe_latent_size if of.moe_latent_size else 0
