"""The arithmetic of a model's architecture."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from rlflow.schema import Section

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class Architecture(Section):
    """The figures of a decoder-only transformer, under the names of its ``config.json``."""

    model_type: Literal["llama", "qwen2", "qwen3"]
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Count
    tie_word_embeddings: bool = False
    rope_theta: Annotated[float, Gt(0)] = 10_000.0

    @property
    def num_parameters(self) -> int:
        """Embeddings, ``num_hidden_layers`` blocks of grouped-query attention and a gated MLP, norms, output head.

        Source: the module shapes of transformers' LlamaForCausalLM, Qwen2ForCausalLM (biases on q, k, v) and
        Qwen3ForCausalLM (a norm each on the heads of q and k).
        """
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        if self.model_type == "qwen2":
            attention += queries + 2 * keys
        if self.model_type == "qwen3":
            attention += 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        block = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * block + self.hidden_size
