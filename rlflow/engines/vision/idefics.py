"""Idefics3: tiles of one size, each with as many tokens, and the names of rows and columns between them."""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.engines.vision.base import Ids, Pixels, VisionFamily, stack_tiles

if TYPE_CHECKING:
    from torch import Tensor

# Larger images are scaled down, by the image processor of transformers.
_LONGEST_EDGE = 4096


class Idefics3(VisionFamily):
    """Idefics3, and SmolVLM of the first version, which is one."""

    placeholder = "<image>"
    tower_prefix = "model.vision_model."
    projector_prefixes = ("model.connector.",)
    reads_videos = False

    def image_ids(self, width: int, height: int) -> Ids:
        return self._ids_of_tiles(*self._tiles(width, height))

    @cache  # noqa: B019
    def _ids_of_tiles(self, rows: int, columns: int) -> Ids:
        tile = self.config.vision_config.image_size // self.config.vision_config.patch_size // self.config.scale_factor
        features, around = "<image>" * tile**2, "<fake_token_around_image>"
        grid = "".join(
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return self._tokens_of(f"{grid}{chr(10) if rows else ''}{around}<global-img>{features}{around}")

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles beside the whole image, which is one more; zero for a small image."""
        processor = self.image_processor
        if not processor.do_image_splitting:
            return 0, 0
        side: int = processor.max_image_size["longest_edge"]
        if processor.do_resize:
            width, height = _scale(width, height, processor.size["longest_edge"])
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return (0, 0) if rows == columns == 1 else (rows, columns)

    @property
    def patches_per_token(self) -> int:
        return int(self.config.scale_factor) ** 2

    def read(self, picture: Any) -> Pixels:
        return Pixels(self.image_processor([[picture]], return_tensors="np")["pixel_values"][0])

    def encode(self, model: Any, images: Sequence[Pixels]) -> "list[Tensor]":
        tiles = stack_tiles(model, images)
        return [model.model.get_image_features(tiles[None], return_dict=True).pooler_output.flatten(0, 1)]

    def served(self, images: Sequence[Pixels]) -> "dict[str, Tensor]":
        import torch

        tiles = torch.from_numpy(np.concatenate([image.values for image in images]))
        return {
            "pixel_values": tiles,
            "pixel_attention_mask": torch.ones_like(tiles[:, 0], dtype=torch.int64),
            "num_patches": torch.tensor([len(image.values) for image in images]),
        }

    def encoder_outputs(self, features: "list[Tensor]") -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=features[0])


def _scale(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size that the image processor scales an image to."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LONGEST_EDGE:
        width, height = _LONGEST_EDGE, int(_LONGEST_EDGE / ratio)
    elif height > width and height > _LONGEST_EDGE:
        width, height = int(_LONGEST_EDGE * ratio), _LONGEST_EDGE
    return max(width, 1), max(height, 1)


FAMILY = Idefics3
