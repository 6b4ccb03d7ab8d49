"""The parts of a model that sees images: which of them are trained, and the figures of the one that reads images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen

from rlflow.errors import RecipeError
from rlflow.schema import Count, CountOrZero, Section

Part = Literal["language", "tower", "projector"]
"""A part of a vision-language model: the tower encodes images, and the projector turns them into tokens."""
TrainedParts = Literal["language", "all"] | Annotated[tuple[Part, ...], MinLen(1)]
TowerType = Literal["idefics3", "internvl", "qwen2_5_vl", "qwen3_vl"]

# Tokens for images in each type of model that can start with random weights, by the names that its tokenizer has for
# them, the placeholder first.
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
# Matrices of an MLP: with a gate it has three.
_MLP_MATRICES = {"qwen2_5_vl": 3}
# Qwen's towers read two frames of a film at once; an image is a film of two.
_FRAMES = {"qwen2_5_vl": 2, "qwen3_vl": 2}
# Learned positions where images have any size (transformers, Qwen3VLVisionConfig.num_position_embeddings).
_POSITIONS = {"qwen2_5_vl": 0, "qwen3_vl": 2304}
# Qwen2.5-VL: patches of a window, and one layer of so many that has none (Qwen2_5_VLVisionConfig).
_WINDOW, _FULL_EVERY = 64, 8
_COLOURS = 3
# Other names of the figures in ``vision_config`` of some models.
_OTHER_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "merge_size": "spatial_merge_size"}


@dataclass(frozen=True, kw_only=True)
class VisionTower(Section):
    """The part of a model that reads images: a transformer over patches, and a projector to the decoder's width.

    Neighbouring patches, a square of them, become one token.
    """

    model_type: TowerType
    """The type of the whole model in transformers. With random weights: idefics3 or internvl."""
    hidden_size: Count
    """The values that represent a patch between layers."""
    intermediate_size: Count
    """The width of an MLP."""
    num_hidden_layers: Count
    """The layers of the tower."""
    num_attention_heads: Count
    """The heads of its attention."""
    image_size: Count | None = None
    """The height and width to which images, or tiles of them, are scaled; null where patches keep the image's size."""
    patch_size: Count
    """The height and width of a patch."""
    merge_size: Count = 2
    """Patches along a side of the square that becomes a token."""
    num_deepstack_layers: CountOrZero = 0
    """Layers whose outputs also go to the decoder, each by a projector of its own (Qwen3-VL)."""

    @property
    def tokens(self) -> Mapping[str, str]:
        """Return the tokens for images of a model with random weights, by name, the placeholder first."""
        return _TOKENS[self.model_type]

    @property
    def num_image_tokens(self) -> int:
        """Return how many placeholders a tile has."""
        assert self.image_size is not None
        return (self.image_size // self.patch_size) ** 2 // self.patches_per_token

    @property
    def patches_per_token(self) -> int:
        """Return how many patches become one token."""
        return self.merge_size**2

    def num_parameters(self, width: int) -> int:
        """Return the parameters of the tower and its projectors, for a decoder of this hidden size."""
        hidden, kind = self.hidden_size, self.model_type
        patch = _COLOURS * _FRAMES.get(kind, 1) * self.patch_size**2 * hidden
        positions = _POSITIONS.get(kind, (self.image_size or 0) ** 2 // self.patch_size**2)
        # Biases and norms: of queries, keys, values, output and MLP, and two norms with a bias.
        layer = self._layer_products + 8 * hidden + self.intermediate_size + 2 * hidden
        return patch + positions * hidden + self.num_hidden_layers * layer + self._projector_products(width)

    def token_flops(self, width: int, tokens: float) -> float:
        """Return the operations of a forward pass for each token of an image that has ``tokens`` of them.

        Two for each parameter and patch, or merged patch in the projector, and four for each value of the hidden state
        and patch that a patch attends to.
        """
        patches, layers = self.patches_per_token, self.num_hidden_layers
        seen = (self.image_size // self.patch_size) ** 2 if self.image_size else tokens * patches
        spans = layers * seen
        if self.model_type == "qwen2_5_vl":
            full = layers // _FULL_EVERY
            spans = full * seen + (layers - full) * min(_WINDOW, seen)
        products = layers * patches * self._layer_products + self._projector_products(width)
        return 2 * products + 4.0 * patches * spans * self.hidden_size

    @property
    def saved_values(self) -> int:
        """Return the values of a patch that a layer saves for its backward pass."""
        return 6 * self.hidden_size + _MLP_MATRICES.get(self.model_type, 2) * self.intermediate_size

    @property
    def _layer_products(self) -> int:
        """Return the parameters of a layer's matrices."""
        mlp = _MLP_MATRICES.get(self.model_type, 2) * self.intermediate_size
        return self.hidden_size * (4 * self.hidden_size + mlp)

    def _projector_products(self, width: int) -> int:
        """Return the parameters of the matrices of all projectors."""
        merged = self.patches_per_token * self.hidden_size
        if self.model_type == "idefics3":
            return merged * width
        if self.model_type == "internvl":
            return merged * width + width * width
        return (1 + self.num_deepstack_layers) * merged * (merged + width)


def tower_figures(model_type: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figures of a tower in ``vision_config``, to be checked; None for a type that is not known.

    ``model_type`` is that of the whole model.
    """
    kind = model_type.removesuffix("_moe")
    if kind not in get_args(TowerType):
        return None
    figures: dict[str, Any] = {"model_type": kind}
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size"):
        figures[name] = content.get(name, content.get(_OTHER_NAMES.get(name, name)))
    if kind in _POSITIONS:
        figures["merge_size"] = content.get(_OTHER_NAMES["merge_size"], 2)
        figures["num_deepstack_layers"] = len(content.get("deepstack_visual_indexes") or ())
    else:
        figures["image_size"] = content.get("image_size")
    # Some files have height and width.
    sizes = {name: value[0] if isinstance(value, list) and value else value for name, value in figures.items()}
    return {name: size for name, size in sizes.items() if size is not None}


def list_parts(trained: TrainedParts) -> tuple[Part, ...]:
    """Return the parts that are trained."""
    if trained == "all":
        return get_args(Part)
    return ("language",) if trained == "language" else trained


def trains_images(trained: TrainedParts) -> bool:
    """Return whether a part that reads images is trained."""
    return list_parts(trained) != ("language",)


def check_tower(tower: VisionTower, path: str) -> None:
    """Check that a tower can be built with random weights from the figures at ``path``. Raises RecipeError."""
    if tower.model_type not in _TOKENS:
        fact = f"random weights are not supported for the type '{tower.model_type}'"
        raise RecipeError(f"{path}.model_type", fact, known=sorted(_TOKENS), fix="use one of these types")
    if not tower.image_size or tower.image_size % (2 * tower.patch_size):
        fact = f"{tower.image_size} is no multiple of two patches of {tower.patch_size}"
        raise RecipeError(f"{path}.image_size", fact, fix=f"a multiple of {2 * tower.patch_size}")
    if tower.merge_size != 2 or tower.num_deepstack_layers:
        fact = "random weights have squares of two patches, and no layers that also go to the decoder"
        raise RecipeError(f"{path}.merge_size", fact, fix="leave it out, and num_deepstack_layers")
    if tower.hidden_size % tower.num_attention_heads:
        fact = f"{tower.num_attention_heads} does not divide hidden_size {tower.hidden_size}"
        raise RecipeError(f"{path}.num_attention_heads", fact, fix="use a divisor")
