"""Models that say one number of each token, a value or a reward, and make no logits."""

from dataclasses import dataclass, fields
from functools import cached_property

from rlflow.resources.models.architecture import Architecture


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
