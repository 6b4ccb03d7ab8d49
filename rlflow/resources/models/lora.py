"""LoRA adapters and how many parameters they have.

A linear layer with an adapter computes W x + alpha / rank B A x, and training changes A and B alone (Hu et al. 2021,
arXiv 2106.09685, equation 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.layers import LayerKind, traits_of
from rlflow.schema import Count, Section

# Ranks of adapters that vLLM reserves room for; smaller ranks are padded.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """The LoRA options of a role, under peft's names."""

    rank: Count = 16
    """The rank of the matrices A and B; at most 512 with vLLM."""
    alpha: Annotated[float, Ge(1e-3), Le(1e6)] = 32.0
    """B A is multiplied by ``alpha / rank``."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank), so that a larger rank learns as fast (rsLoRA, arXiv 2312.03732)."""
    b_learning_rate: Annotated[float, Ge(1), Le(1000)] = 1.0
    """The learning rate of the matrices B, in multiples of that of A (LoRA+, arXiv 2402.12354, which advises 16)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], MinLen(1)] = "all-linear"
    """Names of layers in the model's class, such as ``q_proj``; ``all-linear``: all but the output layer.
    In models with experts these are the layers of attention."""
    experts: bool = False
    """Adapters of all experts, too: an A and a B for each (peft's ``target_parameters``)."""
    merge: bool = False
    """Send engines the model with the adapters merged into it, in place of the adapters. Engines then decode as fast as
    without adapters, and a weight sync is that of a whole model. Changes too small for the weights' type are lost."""

    @property
    def scaling(self) -> float:
        """Return the LoRA scale, alpha / rank or alpha / sqrt(rank)."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    def missing_layers(self, model: Architecture) -> list[str]:
        """Return the target modules that the model does not have; none where the layers of its type are not known."""
        if self.target_modules == "all-linear" or model.model_type not in _PLAIN_TYPES:
            return []
        return [name for name in self.target_modules if name not in LINEAR_LAYERS]


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer in most model types."""
# Other types have other layers as well, or some of these as one.
_PLAIN_TYPES = {"gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"}


def adapter_parameters(model: Architecture, lora: Lora) -> int:
    """Return rank x (inputs + outputs), summed over the layers that have an adapter (Hu et al. 2021, section 4.2)."""
    widths = sum(kind.count * sum(_target_widths(model, lora, kind).values()) for kind in model.layer_kinds)
    if lora.target_modules == "all-linear":
        widths += _own_input_widths(model)
    if lora.experts:
        widths += sum(kind.count * _expert_widths(model) for kind in model.layer_kinds if kind.sparse)
    return lora.rank * widths


def _expert_widths(model: Architecture) -> int:
    """Return inputs plus outputs of all experts of a layer, whose gate and up projections are one weight."""
    return (model.num_experts or 0) * (2 * model.hidden_size + traits_of(model).mlp_matrices * model.expert_width)


def _own_input_widths(model: Architecture) -> int:
    """Return inputs plus outputs of the projections to and from embeddings that layers have of their own (Gemma 4)."""
    hidden, embedding, layers = model.hidden_size, model.hidden_size_per_layer_input, model.num_hidden_layers
    return hidden + layers * embedding + layers * 2 * (hidden + embedding) if embedding else 0


def spares_gradients(lora: Lora | None) -> bool:
    """Return whether the backward pass computes no gradients of weights, from which those of experts' adapters come."""
    return lora is not None and not lora.experts


def adapter_inputs(model: Architecture, lora: Lora, kind: LayerKind) -> int:
    """Return how many values of one token go into the adapted layers of one decoder layer."""
    hidden = model.hidden_size
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj", "in_proj", "gate_proj", "up_proj"), hidden)
    inputs |= {"o_proj": kind.output, "out_proj": kind.output, "down_proj": kind.mlp_width}
    chosen = (model.num_experts_per_tok or 1) if kind.sparse and lora.experts else 0
    return sum(inputs[name] for name in _target_widths(model, lora, kind)) + chosen * (hidden + model.expert_width)


def reserved_rank(lora: Lora) -> int:
    """Return the rank that vLLM reserves room for: the smallest of ``LORA_RANKS`` that the adapters fit into."""
    return next(rank for rank in LORA_RANKS if rank >= lora.rank)


def adapter_tensors(model: Architecture, lora: Lora) -> int:
    """Return the number of tensors: A and B of each layer that has an adapter, and of both weights of experts."""
    return 2 * sum(
        kind.count * (len(_target_widths(model, lora, kind)) + 2 * (lora.experts and kind.sparse))
        for kind in model.layer_kinds
    )


def _target_widths(model: Architecture, lora: Lora, kind: LayerKind) -> Mapping[str, int]:
    """Return inputs plus outputs of each targeted projection of a layer; names that it does not have are ignored."""
    hidden, keys = model.hidden_size, kind.keys // 2
    widths = {}
    if kind.recurrent is not None:
        widths = {"in_proj": hidden + kind.recurrent.projected_width, "out_proj": hidden + kind.output}
    elif kind.queries:
        widths = {
            "q_proj": hidden + kind.queries + kind.gate,
            "k_proj": hidden + keys,
            "v_proj": hidden + kind.keys - keys,
            "o_proj": hidden + kind.output,
        }
    # Beside experts, MLPs have adapters only where they are named, as by other libraries: peft takes their names for
    # those of experts.
    mlp_width = kind.mlp_width
    if model.num_experts:
        width = model.shared_expert_intermediate_size if kind.sparse else kind.mlp_width
        mlp_width = 0 if lora.target_modules == "all-linear" else width
    if mlp_width:
        names = (
            ("gate_proj", "up_proj", "down_proj") if traits_of(model).mlp_matrices == 3 else ("up_proj", "down_proj")
        )
        widths |= dict.fromkeys(names, hidden + mlp_width)
    targets = widths if lora.target_modules == "all-linear" else lora.target_modules
    return {name: width for name, width in widths.items() if name in targets}
