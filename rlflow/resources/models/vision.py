"""The parts of a model that sees images: which of them are trained, and the figures of its tower."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import MinLen

from rlflow.errors import RecipeError
from rlflow.schema import Count, Section

Part = Literal["language", "tower", "projector"]
"""A part of a vision-language model: the tower encodes images, and the projector turns them into tokens."""
TrainedParts = Literal["language", "all"] | Annotated[tuple[Part, ...], MinLen(1)]

# Tokens for images in each type of model by the names that its tokenizer has for them, the placeholder first.
_TOKENS = {
    "idefics3": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    },
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
}


@dataclass(frozen=True, kw_only=True)
class VisionTower(Section):
    """The part of a new model that reads square images: a transformer over patches, four of which become one token."""

    model_type: Literal["idefics3", "internvl"]
    """The type of the whole model in transformers."""
    hidden_size: Count
    """The values that represent a patch between layers."""
    intermediate_size: Count
    """The width of an MLP."""
    num_hidden_layers: Count
    """The layers of the tower."""
    num_attention_heads: Count
    """The heads of its attention."""
    image_size: Count
    """The height and width to which images are scaled."""
    patch_size: Count
    """The height and width of a patch."""

    @property
    def tokens(self) -> Mapping[str, str]:
        """Return the tokens for images by the tokenizer's names for them, the placeholder first."""
        return _TOKENS[self.model_type]

    @property
    def num_image_tokens(self) -> int:
        """Return how many placeholders an image has."""
        return (self.image_size // self.patch_size) ** 2 // 4


def list_parts(trained: TrainedParts) -> tuple[Part, ...]:
    """Return the parts that are trained."""
    if trained == "all":
        return get_args(Part)
    return ("language",) if trained == "language" else trained


def check_tower(tower: VisionTower, path: str) -> None:
    """Check that a tower can be built from the figures at ``path``. Raises RecipeError."""
    if tower.image_size % (2 * tower.patch_size):
        fact = f"{tower.image_size} is no multiple of two patches of {tower.patch_size}"
        raise RecipeError(f"{path}.image_size", fact, fix=f"a multiple of {2 * tower.patch_size}")
    if tower.hidden_size % tower.num_attention_heads:
        fact = f"{tower.num_attention_heads} does not divide hidden_size {tower.hidden_size}"
        raise RecipeError(f"{path}.num_attention_heads", fact, fix="use a divisor")
