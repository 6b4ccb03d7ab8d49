"""A model's architecture: its figures, and how many parameters each of its parts has."""

from dataclasses import dataclass, fields
from functools import cached_property

from rlflow.errors import RecipeError
from rlflow.resources.models.figures import NEEDS, OF_EXPERTS, Figures
from rlflow.resources.models.layers import LayerKind, expert_parameters, layer_kinds, norm_parameters, traits_of
from rlflow.resources.models.vision import check_tower

# The model types that can start with random weights, and the figures that such a model has.
_NEW_TYPES = ("llama", "qwen2", "qwen3_moe", "qwen3")
_NEW_FIGURES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
    *("rope_theta", "attention_bias", "vision"),
)
_NEW_FIGURES_OF_EXPERTS = (*OF_EXPERTS, "moe_intermediate_size")

CUT_TYPES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""The model types whose plans of tensor parallelism, in transformers, cut all layers in styles that ``fsdp`` has."""


def heads_divide(heads: int, key_value_heads: int, size: int) -> bool:
    """Return whether ``size`` ranks can share the heads evenly; a rank holds whole key-value heads or a copy of one."""
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


@dataclass(frozen=True, kw_only=True)
class Architecture(Figures):
    """The figures of a decoder-only transformer, with the number of parameters of each kind."""

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of layers; their counts add up to ``num_hidden_layers``."""
        return layer_kinds(self)

    def cuts_evenly(self, size: int) -> bool:
        """Return whether ``size`` ranks can have a part of each layer and of the vocabulary, all of the same width."""
        widths = (self.num_attention_heads, self.num_key_value_heads, self.vocab_size, self.intermediate_size)
        return self.model_type in CUT_TYPES and all(width % size == 0 for width in widths)

    @cached_property
    def num_parameters(self) -> int:
        """Return the parameters of embeddings, layers, last norm and head."""
        layers = sum(kind.count * kind.parameters for kind in self.layer_kinds)
        return self.embedding_parameters + layers + self._between + norm_parameters(self) + self.head_parameters

    @cached_property
    def num_active_parameters(self) -> int:
        """Return the parameters that one token uses: all except the routed experts that it is not sent to."""
        if not self.num_experts or not self.num_experts_per_tok:
            return self.num_parameters
        idle = self.num_experts - self.num_experts_per_tok
        return self.num_parameters - self.num_sparse_layers * idle * expert_parameters(self)

    @cached_property
    def num_expert_parameters(self) -> int:
        """Return the parameters of all routed experts of all layers, without routers and shared experts."""
        return self.num_sparse_layers * (self.num_experts or 0) * expert_parameters(self)

    @cached_property
    def embedding_parameters(self) -> int:
        """Return the parameters of embeddings: of tokens, of learned positions, and of tokens for each layer."""
        layer_embeddings = self.num_hidden_layers * self.hidden_size_per_layer_input
        return self.vocab_size * (self.hidden_size + layer_embeddings) + _positions(self)

    @cached_property
    def _between(self) -> int:
        """Return the parameters of the projection to the embeddings that layers have of their own, with its norm."""
        width = self.hidden_size_per_layer_input
        return self.hidden_size * self.num_hidden_layers * width + width

    @cached_property
    def head_parameters(self) -> int:
        """Return the parameters of the output head, or 0 where it is tied to the embeddings."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @cached_property
    def output_parameters(self) -> int:
        """Return the parameters of the matrix that yields logits, the head's own or those of the embeddings."""
        return self.head_parameters or self.vocab_size * self.hidden_size

    @cached_property
    def num_outputs(self) -> int:
        """Return how many numbers the head computes for a token."""
        return self.vocab_size

    @cached_property
    def largest_tensor(self) -> int:
        """Return the size of the largest tensor; transformers keeps all experts of a layer in one tensor."""
        dense = 0 if self.num_sparse_layers == self.num_hidden_layers else self.hidden_size * self.intermediate_size
        inputs = self.moe_latent_size or self.hidden_size
        experts = (self.num_experts or 0) * (traits_of(self).mlp_matrices - 1) * inputs * self.expert_width
        embeddings = max(self.hidden_size, self.num_hidden_layers * self.hidden_size_per_layer_input)
        return max(self.vocab_size * embeddings, dense, experts)

    @cached_property
    def largest_module(self) -> int:
        """Return the parameters of the largest part that vLLM loads at once: embedding, head, or a layer's experts."""
        experts = (self.num_experts or 0) * expert_parameters(self) if self.num_sparse_layers else 0
        return max(self.largest_tensor, experts)

    @cached_property
    def num_encoder_parameters(self) -> int:
        """Return the parameters of all encoders, with those of the part that reads images."""
        return self.encoder_parameters + (self.vision.num_parameters(self.hidden_size) if self.vision else 0)

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


def _positions(of: Figures) -> int:
    """Count the position embeddings, where they are learned."""
    extra = traits_of(of).learned_positions
    return 0 if extra is None else (of.max_position_embeddings + extra) * of.hidden_size


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


def check_new(figures: Figures, path: str) -> None:
    """Check that a model with random weights can be built from the figures at ``path``. Raises RecipeError."""
    if figures.model_type not in _NEW_TYPES:
        fact = f"random weights are not supported for the type '{figures.model_type}'"
        fix = f"{path}.model_type={_NEW_TYPES[-1]}, or one of the others"
        raise RecipeError(f"{path}.model_type", fact, known=_NEW_TYPES, fix=fix)
    known = _NEW_FIGURES + (_NEW_FIGURES_OF_EXPERTS if figures.model_type == "qwen3_moe" else ())
    for field in fields(Figures):
        if field.name not in known and getattr(figures, field.name) != field.default:
            fact = f"has no effect on random weights of the type '{figures.model_type}'"
            raise RecipeError(f"{path}.{field.name}", fact, known=known, fix="remove it")
    if figures.vision is not None:
        check_tower(figures.vision, f"{path}.vision")
    if figures.head_dim % 2:
        fact = f"{figures.head_dim} is odd, and rotary position embeddings rotate pairs of values"
        raise RecipeError(f"{path}.head_dim", fact, fix=f"{path}.head_dim={figures.head_dim + 1}")
