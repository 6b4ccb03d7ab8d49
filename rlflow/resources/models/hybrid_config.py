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


def with_known_names(content: Content, model_type: str, path: str) -> Content:
    """Return the content of a file with the names that other model types have.

    Raises RecipeError, at ``path``, for kinds of layers that are not known.
    """
    reader = _READERS.get(model_type)
    return content if reader is None else {**content, **reader(content, path)}


def _delta_rule(content: Content, path: str) -> Content:
    """Return the figures of Qwen's and OLMo's hybrids."""
    layers, heads = content.get("num_hidden_layers", 0), content.get("num_attention_heads", 0)
    interval = content.get("full_attention_interval", _QWEN_INTERVAL)
    usual = ["full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(layers)]
    recurrent = {
        "num_heads": content.get("linear_num_value_heads", heads),
        "head_dim": content.get("linear_value_head_dim", 128),
        "num_key_heads": content.get("linear_num_key_heads", heads),
        "key_head_dim": content.get("linear_key_head_dim", 128),
        "conv_kernel": content.get("linear_conv_kernel_dim", 4),
    }
    # Files of models that have experts in every layer have no width of a dense MLP.
    width = content.get("intermediate_size", content.get("moe_intermediate_size"))
    return {"intermediate_size": width, **_recurrent(content, usual, recurrent, path)}


def _nemotron(content: Content, path: str) -> Content:
    kinds = content.get("layers_block_type") or content.get("layer_types")
    kinds = kinds or [_NEMOTRON_LETTERS.get(letter, letter) for letter in content.get("hybrid_override_pattern", "")]
    kinds = ["linear_attention" if kind == "mamba" else kind for kind in kinds]
    recurrent = {
        "num_heads": content.get("mamba_num_heads", 128),
        "head_dim": content.get("mamba_head_dim", 64),
        "num_key_heads": content.get("n_groups", 8),
        "key_head_dim": content.get("ssm_state_size", 128),
        "conv_kernel": content.get("conv_kernel", 4),
    }
    sparse, dense = kinds.count("moe"), kinds.count("mlp")
    figures: dict[str, Any] = {
        **_recurrent(content, [kind for kind in kinds if kind not in ("moe", "mlp")], recurrent, path),
        "num_hidden_layers": len(kinds),
        "num_mlp_layers": sparse + dense,
        "num_dense_layers": dense if sparse else 0,
        "shared_expert_intermediate_size": content.get("moe_shared_expert_intermediate_size", 0),
    }
    return figures | _experts(content.get("n_routed_experts") if sparse else None)


def _granite(content: Content, path: str) -> Content:
    heads, hidden = content.get("mamba_n_heads", 128), content.get("hidden_size", 0)
    size = content.get("mamba_d_head", "auto")
    recurrent = {
        "num_heads": heads,
        "head_dim": content.get("mamba_expand", 2) * hidden // heads if size == "auto" else size,
        "num_key_heads": content.get("mamba_n_groups", 1),
        "key_head_dim": content.get("mamba_d_state", 256),
        "conv_kernel": content.get("mamba_d_conv", 4),
    }
    figures = dict(_recurrent(content, content.get("layer_types") or (), recurrent, path))
    experts, shared = content.get("num_local_experts", 0), content.get("shared_intermediate_size", 1024)
    figures |= _experts(experts)
    # Without experts, the shared MLP is a dense one.
    return figures | ({"shared_expert_intermediate_size": shared} if experts else {"intermediate_size": shared})


def _granite_shared(content: Content, path: str) -> Content:
    return {"shared_expert_intermediate_size": content.get("shared_intermediate_size", 0)}


def _short_convolution(content: Content, path: str) -> Content:
    """Return the figures of LFM2, whose file may have a width that its class rounds."""
    attending, layers = content.get("full_attn_idxs"), content.get("num_hidden_layers", 0)
    usual = ["full_attention" if attending is None or index in attending else "conv" for index in range(layers)]
    recurrent = {
        "num_heads": 1,
        "head_dim": content.get("hidden_size", 1),
        "conv_kernel": content.get("conv_L_cache", 3),
    }
    width = content.get("block_ff_dim", content.get("intermediate_size", 0))
    if content.get("model_type") == "lfm2" and content.get("block_auto_adjust_ff_dim", True):
        width = int(content.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = content.get("block_multiple_of", 256)
        width = multiple * -(-width // multiple)
    tied = content.get("tie_embedding", content.get("tie_word_embeddings", True))
    return {**_recurrent(content, usual, recurrent, path), "intermediate_size": width, "tie_word_embeddings": tied}


def _gemma4(content: Content, path: str) -> Content:
    """Return Gemma 4's figures; newer files have those of layers without a window by layer."""
    layers = content.get("num_hidden_layers", 0)
    kinds = content.get("layer_types") or [
        "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(layers)
    ]
    overrides: Mapping[str, Any] = next(iter((content.get("per_layer_config") or {}).values()), {})
    figures: dict[str, Any] = {
        "layer_types": kinds,
        "global_head_dim": content.get("global_head_dim", overrides.get("head_dim", 512)),
    }
    heads = content.get("num_global_key_value_heads", overrides.get("num_key_value_heads"))
    if content.get("attention_k_eq_v") and heads is not None:
        figures["num_global_key_value_heads"] = heads
    vocabulary = content.get("vocab_size_per_layer_input", 262144)
    if content.get("hidden_size_per_layer_input", 256) and vocabulary != content.get("vocab_size", 262144):
        raise RecipeError(path, "a model with two vocabularies is not known to the planner")
    experts = content.get("num_experts") if content.get("enable_moe_block") else None
    if experts:
        figures["num_experts_per_tok"] = content.get("top_k_experts", content.get("num_experts_per_tok"))
    return (
        figures | {"hidden_size_per_layer_input": content.get("hidden_size_per_layer_input", 256)} | _experts(experts)
    )


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
    names = ("num_local_experts", "n_routed_experts", "n_shared_experts")
    widths = () if number else ("moe_intermediate_size", "moe_latent_size")
    return {"num_experts": number or None, **dict.fromkeys((*names, *widths))}


def _recurrent(content: Content, usual: Sequence[str], figures: Content, path: str) -> dict[str, Any]:
    """Return the recurrent layers, of the kinds that the file names, or the ``usual`` ones of its class."""
    kinds = list(usual) if content.get("model_type") == "nemotron_h" else content.get("layer_types") or list(usual)
    if unknown := set(kinds) - {*_RECURRENT, *_ATTENTION}:
        raise RecipeError(path, f"layers of {', '.join(sorted(unknown))} are not known to the planner")
    count = sum(kind in _RECURRENT for kind in kinds)
    return {"recurrent": {"num_layers": count, **figures}} if count else {}
