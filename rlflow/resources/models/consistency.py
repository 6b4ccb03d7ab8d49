"""The figures that each model type needs, and a check that all are consistent."""

from rlflow.errors import RecipeError
from rlflow.resources.models.figures import Figures

OF_EXPERTS = ("num_experts", "num_experts_per_tok")
_OF_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Figures that a model type needs in addition to those of all types.
NEEDS = {
    "deepseek_v3": (*OF_EXPERTS, *_OF_LATENT),
    **dict.fromkeys(("gpt_oss", "granitemoeshared", "mixtral", "qwen2_moe", "qwen3_moe"), OF_EXPERTS),
    **dict.fromkeys(("lfm2", "olmo_hybrid", "qwen3_5_text"), ("recurrent",)),
    **dict.fromkeys(("lfm2_moe", "qwen3_5_moe_text", "qwen3_next"), ("recurrent", *OF_EXPERTS)),
}


def check(figures: Figures, path: str) -> None:
    """Check that the figures, which stand at ``path``, are consistent. Raises RecipeError."""
    for name in NEEDS.get(figures.model_type, ()):
        if getattr(figures, name) is None:
            raise RecipeError(f"{path}.{name}", f"is missing for {figures.model_type}", fix=f"add {path}.{name}=...")
    for smaller, larger in (
        ("num_experts_per_tok", "num_experts"),
        ("num_dense_layers", "num_hidden_layers"),
        ("num_full_attention_layers", "num_hidden_layers"),
        ("num_kv_shared_layers", "num_hidden_layers"),
    ):
        low, high = getattr(figures, smaller), getattr(figures, larger)
        if low is not None and high is not None and low > high:
            raise RecipeError(f"{path}.{smaller}", f"{low} is more than the {high} of {larger}", fix=f"at most {high}")
    if figures.num_attention_heads % figures.num_key_value_heads:
        raise RecipeError(f"{path}.num_key_value_heads", "does not divide num_attention_heads", fix="use a divisor")
    if figures.num_attention_layers < 1:
        raise RecipeError(path, "expected at least one layer with attention", fix="more num_hidden_layers")
