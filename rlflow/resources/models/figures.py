"""The figures in a model's ``config.json``, and the widths that follow from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt

from rlflow.errors import RecipeError
from rlflow.schema import Count, Section

ModelType = Literal[
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
]
MODEL_TYPES: tuple[str, ...] = get_args(ModelType)
_OF_EXPERTS = ("num_experts", "num_experts_per_tok")
_OF_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Figures that a model type needs in addition to those of all types.
NEEDS = {
    "deepseek_v3": (*_OF_EXPERTS, *_OF_LATENT),
    **dict.fromkeys(("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _OF_EXPERTS),
}


@dataclass(frozen=True, kw_only=True)
class Figures(Section):
    """The figures of a decoder-only transformer, under the names that most ``config.json`` files use."""

    model_type: ModelType
    hidden_size: Count
    intermediate_size: Count
    """The width of an expert too, where ``moe_intermediate_size`` is not given. OPT: ``ffn_dim``."""
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    """With latent attention: the dimensions of queries and keys, rotated and other."""
    vocab_size: Count
    max_position_embeddings: Count
    tie_word_embeddings: bool = False
    rope_theta: Annotated[float, Gt(0)] = 10_000.0
    attention_bias: bool = False
    """For model types that can be built with and without; the others follow their class."""

    num_experts: Count | None = None
    """Routed experts of a layer: ``num_local_experts``, ``n_routed_experts``."""
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    """The width of one routed expert."""
    shared_expert_intermediate_size: Annotated[int, Ge(0)] = 0
    """The width of all experts that every token uses: ``n_shared_experts`` times ``moe_intermediate_size``."""
    num_dense_layers: Annotated[int, Ge(0)] = 0
    """Layers without experts, in a model with experts: ``first_k_dense_replace``."""

    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    """Given for latent attention (DeepSeek), together with the figures below."""
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None

    sliding_window: Count | None = None
    """Tokens that a query of a windowed layer attends to, including itself."""
    num_full_attention_layers: Annotated[int, Ge(0)] = 0
    """Layers without a window, in a model with a sliding window."""

    @cached_property
    def num_sparse_layers(self) -> int:
        """Return the number of layers with experts."""
        return self.num_hidden_layers - self.num_dense_layers if self.num_experts else 0

    @cached_property
    def num_windowed_layers(self) -> int:
        """Return the number of layers with a sliding window."""
        return self.num_hidden_layers - self.num_full_attention_layers if self.sliding_window else 0

    @cached_property
    def query_width(self) -> int:
        """Return the number of values in a token's queries in one layer."""
        return self.num_attention_heads * (self._latent_head_dims[0] or self.head_dim)

    @cached_property
    def output_width(self) -> int:
        """Return the number of values that a token's attention yields in one layer, before the output projection."""
        return self.num_attention_heads * (self._latent_head_dims[1] or self.head_dim)

    @cached_property
    def key_value_width(self) -> int:
        """Return the number of values in a token's keys and values in one layer.

        Latents count as projected up in training.
        """
        if self.kv_lora_rank:
            return self.query_width + self.output_width
        return 2 * self.num_key_value_heads * self.head_dim

    @cached_property
    def mlp_width(self) -> int:
        """Return the number of values between MLP projections for a token, in the widest kind of layer."""
        if not self.num_experts:
            return self.intermediate_size
        experts = (self.num_experts_per_tok or 0) * self.expert_width + self.shared_expert_intermediate_size
        return max(experts, self.intermediate_size) if self.num_dense_layers else experts

    @cached_property
    def expert_width(self) -> int:
        """Return the number of values between the projections of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @cached_property
    def kv_values_per_token(self) -> int:
        """Return the number of values cached for a token over all layers, as long as no window has passed it."""
        return self.num_hidden_layers * self._cached_width

    def kv_values(self, tokens: float) -> float:
        """Return the number of values cached for one sequence; windowed layers cache no more than their window."""
        windowed = self.num_windowed_layers
        cached = (self.num_hidden_layers - windowed) * tokens
        if self.sliding_window:
            cached += windowed * min(tokens, self.sliding_window)
        return self._cached_width * cached

    def attention_span(self, tokens: float) -> float:
        """Return the mean number of keys that a query attends to, over the queries of a sequence and over layers."""
        everything = tokens / 2
        window = self.sliding_window
        if window is None or tokens <= window:
            return everything
        # The first ``window`` queries see half of it on average, all others the whole window.
        windowed = window - window * window / (2 * tokens)
        share = self.num_windowed_layers / self.num_hidden_layers
        return share * windowed + (1 - share) * everything

    @cached_property
    def _cached_width(self) -> int:
        """Return the cached values of a token in a layer; with latent attention, the latent and one rotated key."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return self.key_value_width

    @cached_property
    def _latent_head_dims(self) -> tuple[int | None, int | None]:
        """Return the head dimensions of queries and keys and of values, with latent attention."""
        if not self.kv_lora_rank:
            return None, None
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0), self.v_head_dim


def check(figures: Figures, path: str) -> None:
    """Check that the figures, which stand at ``path``, are consistent. Raises RecipeError."""
    for name in NEEDS.get(figures.model_type, ()):
        if getattr(figures, name) is None:
            raise RecipeError(f"{path}.{name}", f"is missing for {figures.model_type}", fix=f"add {path}.{name}=...")
    for smaller, larger in (
        ("num_experts_per_tok", "num_experts"),
        ("num_dense_layers", "num_hidden_layers"),
        ("num_full_attention_layers", "num_hidden_layers"),
        ("num_key_value_heads", "num_attention_heads"),
    ):
        low, high = getattr(figures, smaller), getattr(figures, larger)
        if low is not None and high is not None and low > high:
            raise RecipeError(f"{path}.{smaller}", f"{low} is more than the {high} of {larger}", fix=f"at most {high}")
