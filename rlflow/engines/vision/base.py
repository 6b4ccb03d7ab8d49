"""A base class for families of vision-language models, and how to load the family of a model.

Shapes: N tokens of a prompt, F features of an image: one for each of its placeholder tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rlflow.engines.causal_lm.model_files import check_folder, loading_from
from rlflow.engines.causal_lm.new_configs import new_config, new_image_processor
from rlflow.errors import RecipeError, first_line
from rlflow.recipe import Model
from rlflow.resources.models.vision import Part

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]
# The file of each type of model in transformers.
_FILES = {"idefics3": "idefics", "internvl": "internvl", "qwen2_5_vl": "qwen", "qwen3_vl": "qwen"}


@dataclass(frozen=True, eq=False)
class Pixels:
    """An image as the model's tower reads it."""

    values: NDArray[np.float32]
    """[tiles, 3, height, width], or [patches, values of a patch]."""
    grid: tuple[int, int] | None = None
    """The rows and columns of patches, for a tower that reads patches."""

    @property
    def nbytes(self) -> int:
        """Return the size of the values."""
        return self.values.nbytes


class VisionFamily(ABC):
    """The ways of a family of models: which tokens stand for an image, and which tensors."""

    placeholder: ClassVar[str]
    """The text that stands for an image in a prompt. The model's own chat template inserts the same."""
    tower_prefix: ClassVar[str]
    """The beginning of the names of the tower's weights."""
    projector_prefixes: ClassVar[tuple[str, ...]]
    """The beginnings of the names of the projector's weights, which may lie inside of the tower."""

    reads_videos: ClassVar[bool] = True
    """True for models that also read videos, which is not supported here."""

    def __init__(self, config: Any, tokenizer: "PreTrainedTokenizerBase", image_processor: Any) -> None:
        """Take the model's configuration of transformers, its tokenizer and its image processor."""
        self.config = config
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.placeholder_id: int = config.image_token_id
        """The token that stands for an image in a prompt, and after expansion for each of its features."""

    @property
    @abstractmethod
    def patches_per_token(self) -> int:
        """Return how many patches of an image become one token."""

    @property
    def media_ids(self) -> frozenset[int]:
        """Return the tokens that stand for media. They are never sampled."""
        ids = (self.config.image_token_id, getattr(self.config, "video_token_id", None))
        return frozenset(id_ for id_ in ids if id_ is not None)

    @abstractmethod
    def image_ids(self, width: int, height: int) -> Ids:
        """Return the tokens by which the placeholder of an image of this size is replaced."""

    @abstractmethod
    def read(self, picture: Any) -> Pixels:
        """Return the pixels of a picture of PIL, in RGB."""

    @abstractmethod
    def encode(self, model: Any, images: Sequence[Pixels]) -> "list[Tensor]":
        """Return the features of images: [F of all images, hidden size], and the same for some layers of the decoder.

        ``model`` is that of transformers.
        """

    @abstractmethod
    def encoder_outputs(self, features: "list[Tensor]") -> Any:
        """Return features in the form in which a model takes them as ``mm_encoder_outputs["image"]``."""

    @abstractmethod
    def served(self, images: Sequence[Pixels]) -> "dict[str, Tensor]":
        """Return images under the names that vLLM's model of the family takes them."""

    def positions(self, ids: NDArray[np.integer[Any]], images: Sequence[Pixels]) -> NDArray[np.int64] | None:
        """Return the rotary positions [3, N] of an expanded prompt; None where they count tokens."""
        return None

    def dummy(self) -> Pixels:
        """Return the smallest image that the tower reads."""
        side = self.image_side
        return Pixels(np.ones((1, 3, side, side), np.float32))

    @property
    def image_side(self) -> int:
        """Return the height and width of a tile, for a tower that reads tiles."""
        size = self.config.vision_config.image_size
        return int(size if isinstance(size, int) else size[0])

    @classmethod
    def part_of(cls, weight: str) -> Part:
        """Return the part of the model that a weight belongs to."""
        if weight.startswith(cls.projector_prefixes):
            return "projector"
        return "tower" if weight.startswith(cls.tower_prefix) else "language"

    def _tokens_of(self, text: str) -> Ids:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array(ids, np.int32)


def stack_tiles(model: Any, images: Sequence[Pixels]) -> "Tensor":
    """Return the tiles of all images, [tiles, 3, height, width], on the model's device."""
    import torch

    return torch.from_numpy(np.concatenate([image.values for image in images])).to(model.device)


def find_family(model_type: str) -> type[VisionFamily] | None:
    """Return the family of a type of models in transformers; None for those that read text alone, or are not known."""
    file = _FILES.get(model_type)
    return None if file is None else cast("type[VisionFamily]", import_module(f".{file}", __package__).FAMILY)


def load_vision(name: str, options: Model, tokenizer: "PreTrainedTokenizerBase") -> VisionFamily:
    """Load the family of ``models.<name>``, which needs no weights. Raises RecipeError for other models."""
    where, path = f"models.{name}", options.path
    if path is None:
        assert options.architecture is not None
        tower = options.architecture.vision
        if tower is None:
            raise RecipeError(f"{where}.architecture.vision", "is missing, and the data has images", fix="add it")
        new_family = find_family(tower.model_type)
        assert new_family is not None
        return new_family(new_config(options, tokenizer), tokenizer, new_image_processor(tower))
    import transformers

    check_folder(name, options)
    with loading_from(name, path):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    family = find_family(config.model_type)
    if family is None:
        fact = f"images are not supported for models of the type '{config.model_type}'"
        raise RecipeError(f"{where}.path", fact, known=sorted(_FILES), fix="use a model of one of these types")
    try:
        # The same pixels everywhere, whether torchvision is installed or not.
        image_processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    except Exception as error:  # transformers raises errors of many kinds for a damaged file
        fact = f"the image processor of '{path}' cannot be loaded ({first_line(error)})"
        fix = "copy preprocessor_config.json or processor_config.json from the model's repository"
        raise RecipeError(f"{where}.path", fact, fix=fix) from None
    return family(config, tokenizer, image_processor)
