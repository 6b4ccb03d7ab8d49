"""Qwen2.5-VL and Qwen3-VL: patches of an image in its own proportions, with rotary positions in three dimensions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.engines.vision.base import Ids, Pixels, VisionFamily

if TYPE_CHECKING:
    from torch import Tensor


class QwenVL(VisionFamily):
    """Qwen2.5-VL and Qwen3-VL. The latter also adds features of early layers of its tower to layers of the decoder."""

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    tower_prefix = "model.visual."
    projector_prefixes = ("model.visual.merger.", "model.visual.deepstack_merger_list.")

    def image_ids(self, width: int, height: int) -> Ids:
        patches = self.image_processor.get_number_of_image_patches(height, width)
        return np.full(patches // self._merge**2, self.placeholder_id, np.int32)

    @property
    def _merge(self) -> int:
        """Return the rows, and the columns, of patches that become one token."""
        return int(self.config.vision_config.spatial_merge_size)

    @property
    def patches_per_token(self) -> int:
        return self._merge**2

    def read(self, picture: Any) -> Pixels:
        processed = self.image_processor([picture], return_tensors="np")
        _, rows, columns = processed["image_grid_thw"][0].tolist()
        return Pixels(processed["pixel_values"], (rows, columns))

    def encode(self, model: Any, images: Sequence[Pixels]) -> "list[Tensor]":
        import torch

        patches, grids = (value.to(model.device) for value in self.served(images).values())
        outputs = model.model.get_image_features(patches, grids, return_dict=True)
        layers = [outputs.pooler_output, *getattr(outputs, "deepstack_features", ())]
        return [torch.cat(features) for features in layers]

    def served(self, images: Sequence[Pixels]) -> "dict[str, Tensor]":
        import torch

        return {
            "pixel_values": torch.from_numpy(np.concatenate([image.values for image in images])),
            "image_grid_thw": torch.tensor([(1, *image.grid) for image in images if image.grid is not None]),
        }

    def encoder_outputs(self, features: "list[Tensor]") -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        # The model takes a list of images, and does not ask where they end.
        whole, *layers = ([layer] for layer in features)
        return BaseModelOutputWithDeepstackFeatures(pooler_output=whole, deepstack_features=layers)

    def positions(self, ids: NDArray[np.integer[Any]], images: Sequence[Pixels]) -> NDArray[np.int64]:
        """Return the positions of rows, columns and time: those of an image's tokens are its grid.

        Text after an image continues behind the largest of them.
        """
        positions = np.empty((3, len(ids)), np.int64)
        place = position = 0
        starts = np.flatnonzero(ids == self.placeholder_id)
        for image in images:
            assert image.grid is not None
            rows, columns = (side // self._merge for side in image.grid)
            start = int(starts[np.searchsorted(starts, place)])
            positions[:, place:start] = position + np.arange(start - place)
            position += start - place
            place = start + rows * columns
            grid = np.indices((rows, columns)).reshape(2, -1)
            positions[:, start:place] = position + np.concatenate([np.zeros_like(grid[:1]), grid])
            position += max(rows, columns)
        positions[:, place:] = position + np.arange(len(ids) - place)
        return positions

    def dummy(self) -> Pixels:
        vision = self.config.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return Pixels(np.ones((self._merge**2, values), np.float32), (self._merge, self._merge))


FAMILY = QwenVL
