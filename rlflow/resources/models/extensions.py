"""Low-rank adapters beside a model's linear layers: W x + alpha / rank B A x, of which A and B alone are trained
(Hu et al. 2021, arXiv 2106.09685, equation 3).

Models that say one number of each token, a value or a reward, and make no logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Gt, MinLen

from rlflow.resources.models.architecture import Architecture
from rlflow.schema import Count, Section


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """Names are peft's."""

    rank: Count = 16
    alpha: Annotated[float, Gt(0)] = 32.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], MinLen(1)] = "all-linear"
    """As the model's class names its layers, ``q_proj``; ``all-linear``: all but the output layer."""

    @property
    def scaling(self) -> float:
        """Of B A."""
        return self.alpha / self.rank


def adapter_parameters(model: Architecture, lora: Lora) -> int:
    """rank x (inputs + outputs) of each layer that has one (Hu et al. 2021, section 4.2)."""
    return lora.rank * model.num_hidden_layers * sum(_targets(model, lora).values())


def adapter_tensors(model: Architecture, lora: Lora) -> int:
    """A and B of each layer that has one."""
    return 2 * model.num_hidden_layers * len(_targets(model, lora))


def _targets(model: Architecture, lora: Lora) -> Mapping[str, int]:
    """By name, inputs and outputs of a layer's projections. Names of other models' classes count nothing."""
    hidden, keys = model.hidden_size, model.key_value_width // 2
    mlp = hidden + model.mlp_width
    if model.num_experts:
        shared = model.shared_expert_intermediate_size
        mlp = model.num_experts * (hidden + model.expert_width) + (hidden + shared if shared else 0)
    widths = {
        "q_proj": hidden + model.query_width,
        "k_proj": hidden + keys,
        "v_proj": hidden + model.key_value_width - keys,
        "o_proj": hidden + model.output_width,
        "gate_proj": mlp,
        "up_proj": mlp,
        "down_proj": mlp,
    }
    wanted = widths if lora.target_modules == "all-linear" else lora.target_modules
    return {name: width for name, width in widths.items() if name in wanted}


@dataclass(frozen=True, kw_only=True)
class ScalarModel(Architecture):
    """Its head is a vector and a bias, as in transformers' ...ForTokenClassification classes with one label. A reward
    model's has no bias, which is not told apart."""

    @cached_property
    def num_outputs(self) -> int:
        return 1

    @cached_property
    def head_parameters(self) -> int:
        return self.hidden_size + 1


def with_scalar_head(model: Architecture) -> ScalarModel:
    """The same layers with the other head."""
    return ScalarModel(**{field.name: getattr(model, field.name) for field in fields(model)})
