"""Read a model's figures from its ``config.json``, without the library that wrote the file."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.resources.models.architecture import Architecture, check
from rlflow.resources.models.config_file import FIX, read_config
from rlflow.resources.models.figures import MODEL_TYPES, NEEDS, OF_EXPERTS
from rlflow.resources.models.hybrid_config import with_known_names
from rlflow.resources.models.vision import tower_figures
from rlflow.schema import parse

# Multimodal models and other names: their language model has the layers of these types.
_ALIASES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# Neither memory nor time depends on these.
_NOT_PLANNED = {"rope_theta"}
# Other names of our figures in some files.
_OTHER_NAMES = {
    "intermediate_size": ("ffn_dim",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "moe_intermediate_size", "q_lora_rank", "moe_latent_size"),
    *("global_head_dim", "num_global_key_value_heads"),
)
_AS_GIVEN = (
    *("tie_word_embeddings", "attention_bias", "attention_k_eq_v", "use_double_wide_mlp"),
    *("num_kv_shared_layers", "hidden_size_per_layer_input", "num_mlp_layers", "recurrent", "vision"),
)
# Defaults of transformers' configuration classes where a file has no value, as far as they differ from llama's.
_GEMMA3_SIZES = {
    **{"vocab_size": 262208, "max_position_embeddings": 131072},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        **_GEMMA3_SIZES,
        **{"tie_word_embeddings": True, "rope_theta": 1_000_000.0},
    },
    "gemma4_text": {
        **{"vocab_size": 262144, "max_position_embeddings": 131072, "num_attention_heads": 8, "head_dim": 256},
        **{"num_key_value_heads": 4, "sliding_window": 512, "tie_word_embeddings": True, "rope_theta": 1_000_000.0},
    },
    "glm4": {"attention_bias": True, "head_dim": 128},
    "gpt_oss": {"attention_bias": True, "head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1_000_000.0},
    "opt": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}
# In each group of so many layers, the last one has no window.
_WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gemma4_text": 6, "gpt_oss": 2}
_WINDOWED = {*_WINDOW_PATTERN, "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
# Options of known model types whose parameters are not counted: only these values are supported.
_UNCOUNTED = {
    "mlp_bias": False,
    "enable_bias": True,
    "qkv_bias": True,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "moe_layer_freq": 1,
    "use_bias": False,
    "conv_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "mamba_conv_bias": True,
}

_MOST = {"num_hidden_layers": 10_000}
_LONGEST_NAME = 200
"""Characters of a wrong value that an error shows."""


def read_architecture(path: str, where: str) -> Architecture | None:
    """Return the figures of the model at ``path``, a folder or a name on the hub; None without a ``config.json`` here.

    ``where`` is the place of the path in the recipe. Raises RecipeError for a file that lacks figures.
    """
    file = find_config(path)
    if file is None:
        return None
    return architecture_from_config(read_config(file, where), where)


def check_agreement(stated: Architecture, card: str | None, path: str, where: str) -> None:
    """Raise RecipeError where ``stated`` is known not to describe the model at ``path``.

    ``card`` is the model on the hub that the figures belong to, or None where they are written by hand; ``where`` is
    the place of the model in the recipe. A folder that is not on this machine may be on others and passes for now.
    """
    if path == card:
        return
    at, figures = f"{where}.path", f"{where}.architecture"
    file = find_config(path)
    if file is None:
        if card is not None and not _is_folder(path):
            another = f"{where.replace('models.', 'model@models.', 1)}=CARD (conf/model)"
            raise RecipeError(
                at,
                f"'{path}' is not '{card}', whose figures {figures} has, and its own are not on this machine",
                fix=f"{another}; `hf download {path} config.json` and {figures}=null; or, if the figures are the same, "
                f"{where}.architecture_of={path}",
            )
        return
    try:
        theirs = read_architecture(path, at)
    except RecipeError:
        if card is not None:
            raise
        return  # figures written by hand are for files that the planner cannot read
    names = [field.name for field in fields(Architecture) if field.name not in _NOT_PLANNED]
    if differing := [name for name in names if getattr(theirs, name) != getattr(stated, name)]:
        first, more = differing[0], f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        of = f", those of '{card}'," if card is not None else ""
        raise RecipeError(
            at,
            f"'{file}' has {first} {getattr(theirs, first)}, and the figures in {figures}{of} have "
            f"{getattr(stated, first)}{more}",
            fix=f"{figures}=null, which takes the figures of that file",
        )


def _is_folder(path: str) -> bool:
    return path.startswith((".", "/", "~")) or Path(path).is_dir()


def find_config(path: str) -> Path | None:
    """Return the ``config.json`` in a folder, or the newest one of a hub name in this machine's Hugging Face cache."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return file if (file := folder / "config.json").is_file() else None
    snapshots = _hub_cache() / f"models--{path.replace('/', '--')}" / "snapshots"
    return max(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime, default=None)


def _hub_cache() -> Path:
    """Return the folder of the cache, from the environment variables of huggingface_hub."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(folder))
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface")) / "hub"


def architecture_from_config(config: Mapping[str, Any], path: str) -> Architecture:
    """Return the figures in the content of a ``config.json``, or of its ``text_config`` if there is one.

    Raises RecipeError, at ``path``, for an unknown model type and for figures that are missing or wrong.
    """
    config = _with_vision(config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # A part written as a difference from its class leaves shared values to the outer level.
        shared = {name: config[name] for name in ("tie_word_embeddings", "vision") if name in config}
        kind = {"model_type": config.get("model_type"), **shared}
        return architecture_from_config({**kind, **text, "text_config": None}, path)
    model_type = _ALIASES.get(str(config.get("model_type")), str(config.get("model_type")))
    if model_type not in MODEL_TYPES:
        name = model_type[:_LONGEST_NAME]
        raise RecipeError(
            path,
            f"the planner does not know models of type '{name}'",
            known=MODEL_TYPES,
            fix=did_you_mean(name, MODEL_TYPES) or "give the model an architecture, with the model_type most like it",
        )
    content = {**_DEFAULTS.get(model_type, {}), **{name: value for name, value in config.items() if value is not None}}
    # Null means no window; for other figures it means the default of the class.
    if config.get("sliding_window", 0) is None:
        content.pop("sliding_window", None)
    if "num_hidden_layers" in content:
        _count(content, "num_hidden_layers", path)
    try:
        named = with_known_names(content, model_type, path)
        return _architecture({name: value for name, value in named.items() if value is not None}, model_type, path)
    except RecipeError as error:
        error.notes["Fix"] = error.notes["Fix"] or FIX
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        fact = f"the model's config.json has a value of another type or size than expected ({first_line(error)})"
        raise RecipeError(path, fact, fix=FIX) from None


def _architecture(content: Mapping[str, Any], model_type: str, path: str) -> Architecture:
    needed = {*_REQUIRED, *NEEDS.get(model_type, ()), *(OF_EXPERTS if content.get("num_experts") else ())}
    counts = {name: _count(content, name, path) for name in sorted(needed - {"recurrent"})}
    counts |= {name: _count(content, name, path) for name in _OPTIONAL if name in content}
    heads, layers = counts["num_attention_heads"], counts["num_hidden_layers"]
    for name, counted in {**_UNCOUNTED, "word_embed_proj_dim": counts["hidden_size"]}.items():
        if content.get(name, counted) != counted:
            raise RecipeError(path, f"a model with {name} {content[name]} is not known to the planner")
    counts.setdefault("num_key_value_heads", heads)
    if "kv_lora_rank" in counts:
        counts["head_dim"] = counts["qk_nope_head_dim"] + counts["qk_rope_head_dim"]
    elif "head_dim" not in counts:
        if counts["hidden_size"] % heads:
            raise RecipeError(path, f"hidden_size {counts['hidden_size']} is not a multiple of {heads} heads")
        counts["head_dim"] = counts["hidden_size"] // heads
    figures: dict[str, Any] = {"model_type": model_type, **counts, "rope_theta": _rope_theta(content)}
    figures |= {name: content[name] for name in _AS_GIVEN if name in content}
    if "num_experts" in counts:
        figures["num_dense_layers"] = _dense_layers(content, layers, path)
        figures["shared_expert_intermediate_size"] = _shared_width(content, counts, path)
    figures |= _windows(content, model_type, layers, path)
    architecture = parse(Architecture, figures, path)
    check(architecture, path)
    return architecture


def _with_vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content with the figures of the part that reads images, if it has one that the planner knows."""
    part = config.get("vision_config")
    figures = tower_figures(str(config.get("model_type")), part) if isinstance(part, Mapping) else None
    return config if figures is None else {**config, "vision": figures, "vision_config": None}


def _count(content: Mapping[str, Any], name: str, path: str) -> int:
    for other in (name, *_OTHER_NAMES.get(name, ())):
        if other in content:
            value = content[other]
            highest = _MOST.get(name, 2**31 - 1)
            if type(value) is not int or not 1 <= value <= highest:
                fact = f"has {other} {repr(value)[:_LONGEST_NAME]}, not a number from 1 to {highest}"
                raise RecipeError(path, f"the model's config.json {fact}", fix=FIX)
            return value
    raise RecipeError(path, f"the model's config.json does not say {name}", fix=FIX)


def _rope_theta(content: Mapping[str, Any]) -> Any:
    """Return rope_theta. Newer files have it in ``rope_parameters``, by kind of layer if the kinds differ."""
    place: Any = content.get("rope_parameters")
    if isinstance(place, Mapping):
        place = place.get("full_attention", place)
    newer = place.get("rope_theta") if isinstance(place, Mapping) else None
    return newer or content.get("rope_theta", 10_000.0)


def _dense_layers(content: Mapping[str, Any], layers: int, path: str) -> Any:
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if name in content:
            return content[name]
    step = _count({"decoder_sparse_step": 1, **content}, "decoder_sparse_step", path)
    named = content.get("mlp_only_layers", [])
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        fact = "the model's config.json has mlp_only_layers that are not a list of the numbers of layers"
        raise RecipeError(path, fact, fix=FIX)
    dense = set(named)
    return sum(layer in dense or (layer + 1) % step != 0 for layer in range(layers))


def _shared_width(content: Mapping[str, Any], counts: Mapping[str, int], path: str) -> Any:
    if "n_shared_experts" in content:
        width = counts.get("moe_intermediate_size", counts["intermediate_size"])
        return _count(content, "n_shared_experts", path) * width
    return content.get("shared_expert_intermediate_size", 0)


def _windows(content: Mapping[str, Any], model_type: str, layers: int, path: str) -> dict[str, int]:
    """Return the sliding window and the number of layers without one; nothing for a model without a window."""
    if not content.get("sliding_window") or model_type not in _WINDOWED:
        return {}
    # Qwen's files have a window that is not used.
    if model_type.startswith("qwen") and not content.get("use_sliding_window", False):
        return {}
    window = _count(content, "sliding_window", path)
    if kinds := content.get("layer_types"):
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise RecipeError(path, f"layers of {', '.join(sorted(unknown))} are not known to the planner")
        full = kinds.count("full_attention")
    elif model_type in _WINDOW_PATTERN:
        every = {"sliding_window_pattern": _WINDOW_PATTERN[model_type], **content}
        full = layers // _count(every, "sliding_window_pattern", path)
    elif model_type.startswith("qwen") and "max_window_layers" in content:
        # The first layers.
        full = min(layers, _count(content, "max_window_layers", path))
    else:
        full = 0
    return {"sliding_window": window, "num_full_attention_layers": full} if full < layers else {}
