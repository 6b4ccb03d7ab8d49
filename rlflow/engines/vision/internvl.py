"""InternVL in transformers' own form: tiles of one size, each with as many tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.engines.vision.base import Ids, Pixels, VisionFamily, stack_tiles

if TYPE_CHECKING:
    from torch import Tensor


class InternVL(VisionFamily):
    """InternVL2.5 to InternVL3.5, converted to ``InternVLForConditionalGeneration``."""

    placeholder = "<IMG_CONTEXT>"
    tower_prefix = "model.vision_tower."
    projector_prefixes = ("model.multi_modal_projector.",)

    def image_ids(self, width: int, height: int) -> Ids:
        tiles = self.image_processor.get_number_of_image_patches(height, width)
        return self._tokens_of(f"<img>{self.placeholder * (tiles * self.config.image_seq_length)}</img>")

    @property
    def patches_per_token(self) -> int:
        return round(float(self.config.downsample_ratio) ** -2)

    def read(self, picture: Any) -> Pixels:
        return Pixels(self.image_processor([picture], return_tensors="np")["pixel_values"])

    def encode(self, model: Any, images: Sequence[Pixels]) -> "list[Tensor]":
        outputs = model.model.get_image_features(
            stack_tiles(model, images),
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            return_dict=True,
        )
        return [outputs.pooler_output.flatten(0, 1)]

    def served(self, images: Sequence[Pixels]) -> "dict[str, Tensor]":
        import torch

        return {
            "pixel_values": torch.from_numpy(np.concatenate([image.values for image in images])),
            "image_num_patches": torch.tensor([len(image.values) for image in images]),
            "image_token_id": torch.tensor(self.placeholder_id),
        }

    def encoder_outputs(self, features: "list[Tensor]") -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        # The model counts features by tiles.
        return BaseModelOutputWithPooling(pooler_output=features[0][:, None])


FAMILY = InternVL
