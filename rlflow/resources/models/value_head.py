"""Models that expect a return before each token, and make no logits."""

from dataclasses import dataclass, fields
from functools import cached_property

from rlflow.resources.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class ValueModel(Architecture):
    """Its head is a vector and a bias, as in transformers' ...ForTokenClassification classes with one label."""

    @cached_property
    def num_outputs(self) -> int:
        return 1

    @cached_property
    def head_parameters(self) -> int:
        return self.hidden_size + 1


def with_value_head(model: Architecture) -> ValueModel:
    """The same layers with the other head."""
    return ValueModel(**{field.name: getattr(model, field.name) for field in fields(model)})
