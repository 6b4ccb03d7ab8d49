"""The figures in a model's ``config.json``, and the widths that follow from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Le, Unit

from rlflow.resources.models.vision import VisionTower
from rlflow.schema import Count, CountOrZero, Section

ModelType = Literal[
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_oss",
    "granitemoehybrid",
    "granitemoeshared",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo_hybrid",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
]
MODEL_TYPES: tuple[str, ...] = get_args(ModelType)
OF_EXPERTS = ("num_experts", "num_experts_per_tok")
_OF_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Figures that a model type needs in addition to those of all types.
NEEDS = {
    "deepseek_v3": (*OF_EXPERTS, *_OF_LATENT),
    **dict.fromkeys(("gpt_oss", "granitemoeshared", "mixtral", "qwen2_moe", "qwen3_moe"), OF_EXPERTS),
    **dict.fromkeys(("lfm2", "olmo_hybrid", "qwen3_5_text"), ("recurrent",)),
    **dict.fromkeys(("lfm2_moe", "qwen3_5_moe_text", "qwen3_next"), ("recurrent", *OF_EXPERTS)),
}


@dataclass(frozen=True, kw_only=True)
class Recurrent(Section):
    """Layers with a state of constant size in place of a KV cache: Mamba-2, the gated delta rule, short convolutions.

    A token has a value in each head, and a key and a query in each key head; Mamba calls these x, B and C. The state of
    a head is a matrix of keys by values.
    """

    num_layers: Count
    """The number of these layers."""
    num_heads: Count
    """Heads of values: ``mamba_num_heads``, ``linear_num_value_heads``."""
    head_dim: Count
    """Values of a head."""
    num_key_heads: CountOrZero = 0
    """Mamba's ``n_groups``, ``linear_num_key_heads``; 0 for layers that are only a convolution."""
    key_head_dim: CountOrZero = 0
    """Mamba's ``ssm_state_size``, ``linear_key_head_dim``."""
    conv_kernel: Count = 4
    """Tokens that a convolution spans."""

    @property
    def value_width(self) -> int:
        """Return the number of a token's values in one layer."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Return the number of values in a token's keys in one layer; its queries have as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def projected_width(self) -> int:
        """Return the number of values that a token's input is projected to: queries, keys, values and their gate."""
        return 2 * self.key_width + (2 if self.num_key_heads else 3) * self.value_width

    @property
    def state_bytes(self) -> float:
        """Return the size of a sequence's states in all layers: matrices in fp32, inputs of convolutions in bf16."""
        convolved = 2 * self.key_width + self.value_width
        return self.num_layers * (4 * self.key_head_dim * self.value_width + 2 * (self.conv_kernel - 1) * convolved)


@dataclass(frozen=True, kw_only=True)
class Figures(Section):
    """The figures of a decoder-only transformer, under the names that most ``config.json`` files use."""

    model_type: ModelType
    """The type of the model in transformers."""
    hidden_size: Count
    """The values that represent a token between layers."""
    intermediate_size: Count
    """The width of an MLP, and of an expert where ``moe_intermediate_size`` is not given. OPT: ``ffn_dim``."""
    num_hidden_layers: Count
    """The layers of the decoder."""
    num_attention_heads: Count
    """The heads of queries."""
    num_key_value_heads: Count
    """The heads of keys and values."""
    head_dim: Count
    """Values of a head. With latent attention: the dimensions of queries and keys, rotated and other."""
    vocab_size: Count
    """Rows of the embeddings."""
    max_position_embeddings: Annotated[Count, Unit("tokens")]
    """The longest sequence."""
    tie_word_embeddings: bool = False
    """The output layer is that of the embeddings."""
    rope_theta: Annotated[float, Ge(1), Le(1e12)] = 10_000.0
    """The base of rotary position embeddings."""
    attention_bias: bool = False
    """Projections of attention have a bias, in model types that can be built with and without."""

    num_experts: Count | None = None
    """Routed experts of a layer: ``num_local_experts``, ``n_routed_experts``."""
    num_experts_per_tok: Count | None = None
    """The routed experts that a token uses."""
    moe_intermediate_size: Count | None = None
    """The width of one routed expert."""
    shared_expert_intermediate_size: CountOrZero = 0
    """The width of all experts that every token uses: ``n_shared_experts`` times ``moe_intermediate_size``."""
    num_dense_layers: CountOrZero = 0
    """Layers without experts, in a model with experts: ``first_k_dense_replace``."""

    q_lora_rank: Count | None = None
    """The width of the latent of queries, in latent attention."""
    kv_lora_rank: Count | None = None
    """The width of the cached latent, for latent attention (DeepSeek); the figures below belong to it."""
    qk_nope_head_dim: Count | None = None
    """Values of a head of queries and keys that are not rotated."""
    qk_rope_head_dim: Count | None = None
    """Values of a head of queries and keys that are rotated."""
    v_head_dim: Count | None = None
    """Values of a head of values."""

    sliding_window: Annotated[Count, Unit("tokens")] | None = None
    """Tokens that a query of a windowed layer attends to, including itself."""
    num_full_attention_layers: CountOrZero = 0
    """Layers without a window, in a model with a sliding window."""

    recurrent: Recurrent | None = None
    """Layers without a KV cache, in a hybrid model."""
    num_mlp_layers: CountOrZero = 0
    """Layers that are an MLP or experts alone, in a model whose other layers have none (Nemotron-H)."""
    moe_latent_size: Count | None = None
    """The width of what goes to and from routed experts, where it is not the model's."""

    global_head_dim: Count | None = None
    """Gemma 4: the head dimension of layers without a window."""
    num_global_key_value_heads: Count | None = None
    """Gemma 4: the heads of keys and values in layers without a window."""
    attention_k_eq_v: bool = False
    """Layers without a window use their keys as values, too."""
    num_kv_shared_layers: CountOrZero = 0
    """The last layers, which use the keys and values of earlier ones."""
    use_double_wide_mlp: bool = False
    """Layers with shared keys and values have an MLP of twice the width."""
    hidden_size_per_layer_input: CountOrZero = 0
    """The width of embeddings that each layer has of its own."""
    encoder_parameters: Annotated[int, Ge(0), Le(2**53)] = 0
    """Parameters of encoders of images and sound, which stay frozen; not among those of the decoder."""
    vision: VisionTower | None = None
    """The part that reads images. It stays frozen by default, and is not among the parameters of the decoder."""

    @cached_property
    def num_recurrent_layers(self) -> int:
        """Return the number of layers with a state of constant size."""
        return self.recurrent.num_layers if self.recurrent else 0

    @cached_property
    def num_attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_hidden_layers - self.num_mlp_layers - self.num_recurrent_layers

    @cached_property
    def num_sparse_layers(self) -> int:
        """Return the number of layers with experts."""
        return (self.num_mlp_layers or self.num_hidden_layers) - self.num_dense_layers if self.num_experts else 0

    @cached_property
    def num_windowed_layers(self) -> int:
        """Return the number of layers with a sliding window."""
        return self.num_attention_layers - self.num_full_attention_layers if self.sliding_window else 0

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of attentions, recurrences and MLPs; tensor-parallel ranks add up the output of each."""
        return self.num_hidden_layers if self.num_mlp_layers else 2 * self.num_hidden_layers

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
    def global_key_value_width(self) -> int:
        """Return the values of a token's keys and values in a layer without a window (Gemma 4)."""
        heads = self.num_global_key_value_heads or self.num_key_value_heads
        return 2 * heads * (self.global_head_dim or self.head_dim)

    @cached_property
    def mlp_width(self) -> int:
        """Return the number of values between MLP projections for a token, in the widest kind of layer."""
        if not self.num_experts:
            return self.intermediate_size * (2 if self.use_double_wide_mlp else 1)
        return max(self.sparse_width, self.intermediate_size) if self.num_dense_layers else self.sparse_width

    @cached_property
    def sparse_width(self) -> int:
        """Return the number of values between the projections of all experts that a token uses."""
        shared = self.shared_expert_intermediate_size
        # Gemma 4 has a dense MLP beside the experts.
        shared += self.intermediate_size if self.model_type == "gemma4_text" else 0
        return (self.num_experts_per_tok or 0) * self.expert_width + shared

    @cached_property
    def expert_width(self) -> int:
        """Return the number of values between the projections of one routed expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @cached_property
    def kv_values_per_token(self) -> int:
        """Return the number of values cached for a token over all layers, as long as no window has passed it."""
        return int(self.kv_values(1.0))

    def kv_values(self, tokens: float) -> float:
        """Return the number of values cached for one sequence.

        Windowed layers cache no more than their window, and layers that share the cache of others nothing.
        """
        windowed = self.num_windowed_layers
        full = self.num_attention_layers - windowed
        full -= self.num_kv_shared_layers * full // self.num_hidden_layers
        windowed -= self.num_kv_shared_layers * windowed // self.num_hidden_layers
        wide, narrow = self.cached_widths
        return full * tokens * wide + windowed * min(tokens, self.sliding_window or 0.0) * narrow

    @cached_property
    def cached_widths(self) -> tuple[int, int]:
        """Return the cached values of a token in a layer without a window, and with one."""
        return self.global_key_value_width if self.global_head_dim else self._cached_width, self._cached_width

    def state_tokens(self, width: int) -> float:
        """Return how many tokens' KV cache is as large as a sequence's recurrent states, on one of ``width`` GPUs.

        States are divided by heads; key-value heads are copied if there are fewer than GPUs.
        """
        if self.recurrent is None:
            return 0.0
        copies = min(self.num_key_value_heads, width)
        return self.recurrent.state_bytes / width / (2 * self.kv_values_per_token / copies)

    def attention_span(self, tokens: float) -> float:
        """Return the mean number of keys that a query attends to, over the queries and the layers with attention."""
        everything = tokens / 2
        window = self.sliding_window
        if window is None or tokens <= window:
            return everything
        # The first ``window`` queries see half of it on average, all others the whole window.
        windowed = window - window * window / (2 * tokens)
        share = self.num_windowed_layers / self.num_attention_layers
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
