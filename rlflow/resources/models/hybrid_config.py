"""Read the figures of hybrid models and of Gemma 4 from a ``config.json``, where each type has names of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.errors import RecipeError

Content = Mapping[str, Any]

_RECURRENT = ("linear_attention", "mamba", "conv")
_ATTENTION = ("full_attention", "attention")
_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Every so many layers of Qwen's hybrids, one has attention.
_QWEN_INTERVAL = 4


def with_known_names(given: Content, model_type: str, path: str) -> Content:
    """Return the content of a file with the names that other model types have.

    Raises RecipeError, at ``path``, for kinds of layers that are not known.
    """
    reader = _READERS.get(model_type)
    return given if reader is None else {**given, **reader(given, path)}


def _delta_rule(given: Content, path: str) -> Content:
    """Return the figures of Qwen's and OLMo's hybrids."""
    layers, heads = given.get("num_hidden_layers", 0), given.get("num_attention_heads", 0)
    interval = given.get("full_attention_interval", _QWEN_INTERVAL)
    usual = ["full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(layers)]
    recurrent = {
        "num_heads": given.get("linear_num_value_heads", heads),
        "head_dim": given.get("linear_value_head_dim", 128),
        "num_key_heads": given.get("linear_num_key_heads", heads),
        "key_head_dim": given.get("linear_key_head_dim", 128),
        "conv_kernel": given.get("linear_conv_kernel_dim", 4),
    }
    # Files of models that have experts in every layer have no width of a dense MLP.
    width = given.get("intermediate_size", given.get("moe_intermediate_size"))
    return {"intermediate_size": width, **_recurrent(given, usual, recurrent, path)}


def _nemotron(given: Content, path: str) -> Content:
    kinds = given.get("layers_block_type") or given.get("layer_types")
    kinds = kinds or [_NEMOTRON_LETTERS.get(letter, letter) for letter in given.get("hybrid_override_pattern", "")]
    kinds = ["linear_attention" if kind == "mamba" else kind for kind in kinds]
    recurrent = {
        "num_heads": given.get("mamba_num_heads", 128),
        "head_dim": given.get("mamba_head_dim", 64),
        "num_key_heads": given.get("n_groups", 8),
        "key_head_dim": given.get("ssm_state_size", 128),
        "conv_kernel": given.get("conv_kernel", 4),
    }
    sparse, dense = kinds.count("moe"), kinds.count("mlp")
    figures: dict[str, Any] = {
        **_recurrent(given, [kind for kind in kinds if kind not in ("moe", "mlp")], recurrent, path),
        "num_hidden_layers": len(kinds),
        "num_mlp_layers": sparse + dense,
        "num_dense_layers": dense if sparse else 0,
        "shared_expert_intermediate_size": given.get("moe_shared_expert_intermediate_size", 0),
    }
    return figures | _experts(given.get("n_routed_experts") if sparse else None)


def _granite(given: Content, path: str) -> Content:
    heads, hidden = given.get("mamba_n_heads", 128), given.get("hidden_size", 0)
    size = given.get("mamba_d_head", "auto")
    recurrent = {
        "num_heads": heads,
        "head_dim": given.get("mamba_expand", 2) * hidden // heads if size == "auto" else size,
        "num_key_heads": given.get("mamba_n_groups", 1),
        "key_head_dim": given.get("mamba_d_state", 256),
        "conv_kernel": given.get("mamba_d_conv", 4),
    }
    figures = dict(_recurrent(given, given.get("layer_types") or (), recurrent, path))
    experts, shared = given.get("num_local_experts", 0), given.get("shared_intermediate_size", 1024)
    figures |= _experts(experts)
    # Without experts, the shared MLP is a dense one.
    return figures | ({"shared_expert_intermediate_size": shared} if experts else {"intermediate_size": shared})


def _granite_shared(given: Content, path: str) -> Content:
    return {"shared_expert_intermediate_size": given.get("shared_intermediate_size", 0)}


def _short_convolution(given: Content, path: str) -> Content:
    """Return the figures of LFM2, whose file may have a width that its class rounds."""
    attending, layers = given.get("full_attn_idxs"), given.get("num_hidden_layers", 0)
    usual = ["full_attention" if attending is None or index in attending else "conv" for index in range(layers)]
    recurrent = {
        "num_heads": 1,
        "head_dim": given.get("hidden_size", 1),
        "conv_kernel": given.get("conv_L_cache", 3),
    }
    width = given.get("block_ff_dim", given.get("intermediate_size", 0))
    if given.get("model_type") == "lfm2" and given.get("block_auto_adjust_ff_dim", True):
        width = int(given.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = given.get("block_multiple_of", 256)
        width = multiple * -(-width // multiple)
    tied = given.get("tie_embedding", given.get("tie_word_embeddings", True))
    return {**_recurrent(given, usual, recurrent, path), "intermediate_size": width, "tie_word_embeddings": tied}


def _gemma4(given: Content, path: str) -> Content:
    """Return Gemma 4's figures; newer files have those of layers without a window by layer."""
    layers = given.get("num_hidden_layers", 0)
    kinds = given.get("layer_types") or [
        "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(layers)
    ]
    overrides: Mapping[str, Any] = next(iter((given.get("per_layer_config") or {}).values()), {})
    figures: dict[str, Any] = {
        "layer_types": kinds,
        "global_head_dim": given.get("global_head_dim", overrides.get("head_dim", 512)),
    }
    heads = given.get("num_global_key_value_heads", overrides.get("num_key_value_heads"))
    if given.get("attention_k_eq_v") and heads is not None:
        figures["num_global_key_value_heads"] = heads
    vocabulary = given.get("vocab_size_per_layer_input", 262144)
    if given.get("hidden_size_per_layer_input", 256) and vocabulary != given.get("vocab_size", 262144):
        raise RecipeError(path, "a model with two vocabularies is not known to the planner")
    experts = given.get("num_experts") if given.get("enable_moe_block") else None
    if experts:
        figures["num_experts_per_tok"] = given.get("top_k_experts", given.get("num_experts_per_tok"))
    return figures | {"hidden_size_per_layer_input": given.get("hidden_size_per_layer_input", 256)} | _experts(experts)


_READERS: Mapping[str, Callable[[Content, str], Content]] = {
    "gemma4_text": _gemma4,
    "granitemoehybrid": _granite,
    "granitemoeshared": _granite_shared,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "nemotron_h": _nemotron,
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _delta_rule),
}


def _experts(number: int | None) -> dict[str, Any]:
    """Return the number of routed experts under one name, or no figures of experts."""
    others = ("num_local_experts", "n_routed_experts", "n_shared_experts")
    widths = () if number else ("moe_intermediate_size", "moe_latent_size")
    return {"num_experts": number or None, **dict.fromkeys((*others, *widths))}


def _recurrent(given: Content, usual: Sequence[str], figures: Content, path: str) -> dict[str, Any]:
    """Return the recurrent layers, of the kinds that the file names, or the ``usual`` ones of its class."""
    kinds = list(usual) if given.get("model_type") == "nemotron_h" else given.get("layer_types") or list(usual)
    if others := set(kinds) - {*_RECURRENT, *_ATTENTION}:
        raise RecipeError(path, f"layers of {', '.join(sorted(others))} are not known to the planner")
    count = sum(kind in _RECURRENT for kind in kinds)
    return {"recurrent": {"num_layers": count, **figures}} if count else {}
