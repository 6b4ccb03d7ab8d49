"""The images of a batch in the passes of a model: read once, encoded once a pass, and put where their tokens are.

Shapes: N tokens of the stream, F features of all images of a pass.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.batch import Packed, Sequences
from rlflow.batch.images import Image, images_of
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.engines.causal_lm.micro_batches import PatchLimit
from rlflow.engines.causal_lm.packing import Index, Stream, rope_of_stream
from rlflow.engines.vision.base import Ids, Pixels, VisionFamily, find_family, load_vision
from rlflow.errors import EngineError, RecipeError
from rlflow.resources.models.vision import list_parts, trains_images

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# An image of 64 megapixels takes up to a gigabyte while it is decoded, and a second.
_THREADS = 8
# The pixels that stay in memory: a step passes over its images several times.
_CACHE_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """The features of a pass, as arguments of the model."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    anchor: "Tensor | None" = None
    """Zero, with gradients of zero for the tower. A loss that contains it keeps ranks without images in step."""


@dataclass(frozen=True, eq=False)
class ServedImages:
    """The processed images of a prompt, for an engine that serves requests."""

    fields: "dict[str, Tensor]"
    """Their pixels, under the names that vLLM's model takes."""
    digests: list[str]
    places: "list[Tensor]"
    """The places in the prompt of each image's features."""


class Vision:
    """The images of an engine's model: reads them, encodes them, and places their features."""

    def __init__(self, family: VisionFamily, *, is_trained: bool = False, encodes_always: bool = False) -> None:
        """Prepare to read images for a model whose tower or projector ``is_trained``.

        With ``encodes_always`` a pass without images encodes a dummy. The ranks of a sharded model need it: all of them
        must run the same layers in each pass.
        """
        self.family = family
        self._is_trained = is_trained
        self._encodes_always = encodes_always
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._cache: OrderedDict[str, Pixels] = OrderedDict()
        self._cache_bytes = 0

    def limit_patches(self, sequences: Sequences, most: int | None) -> PatchLimit | None:
        """Return the limit of a pass, with the patches of each row by its tokens that stand for images."""
        if most is None or sequences.images is None:
            return None
        ids = sequences.prompt_ids
        is_feature = (ids.values == self.family.placeholder_id).astype(np.int64)
        features = np.add.reduceat(is_feature, ids.offsets[:-1])
        return PatchLimit(most, features * self.family.patches_per_token)

    def place(self, stream: Stream, images: Packed | None) -> tuple[Stream, list[Pixels]]:
        """Return the stream with the places of features and with rotary positions, and the pixels of its images.

        ``images`` are those of the rows that were packed.
        """
        is_feature = stream.ids == self.family.placeholder_id
        by_prompt = [() if images is None else images_of(images, row) for row in stream.prompt_rows]
        pixels = iter(self._read([image for prompt in by_prompt for image in prompt]))
        pixels_by_prompt = [[next(pixels) for _ in prompt] for prompt in by_prompt]
        placed = replace(
            stream,
            features=np.where(is_feature, np.cumsum(is_feature) - 1, -1),
            rope=self._rope(stream, pixels_by_prompt) if any(pixels_by_prompt) else None,
        )
        return placed, [image for prompt in pixels_by_prompt for image in prompt]

    def encode(self, model: Any, stream: Stream, shard: Stream, pixels: Sequence[Pixels]) -> EncodedImages:
        """Return the features of a pass, for the tokens that this rank holds of the stream.

        Raises EngineError if there are more placeholders than features or fewer: then images were lost on the way.
        """
        import torch

        assert stream.features is not None
        assert shard.features is not None
        count = int(stream.features.max()) + 1
        if not pixels and not self._encodes_always:
            _check_count(count, 0)
            return EncodedImages({})
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._is_trained):
            features = self.family.encode(getattr(model, "module", model), pixels or [self.family.dummy()])
        _check_count(count, len(features[0]) if pixels else 0)
        anchor = 0.0 * torch.stack([layer.float().mean() for layer in features]).sum() if self._is_trained else None
        if not pixels:
            return EncodedImages({}, anchor)
        if shard is not stream:
            places = to_device(shard.features[shard.features >= 0], model.device)
            features = [layer.index_select(0, places) for layer in features]
        return EncodedImages({"mm_encoder_outputs": {"image": self.family.encoder_outputs(features)}}, anchor)

    def serve(self, ids: Ids, images: Sequence[Image]) -> ServedImages:
        """Return the processed images of an expanded prompt. Raises EngineError if it has other placeholders."""
        import torch

        family = self.family
        counts = [int((family.image_ids(i.width, i.height) == family.placeholder_id).sum()) for i in images]
        places = np.flatnonzero(ids == family.placeholder_id)
        _check_count(len(places), sum(counts))
        by_image = [torch.from_numpy(part) for part in np.split(places, np.cumsum(counts)[:-1])]
        return ServedImages(family.served(self._read(images)), [image.digest for image in images], by_image)

    def _rope(self, stream: Stream, pixels: Sequence[Sequence[Pixels]]) -> Index | None:
        is_prompt = stream.segments.prompt_lengths == 0
        starts, lengths = stream.segments.starts[is_prompt], stream.segments.lengths[is_prompt]
        positions = [
            self.family.positions(stream.ids[start : start + length], images)
            for start, length, images in zip(starts, lengths, pixels, strict=True)
        ]
        known = [prompt for prompt in positions if prompt is not None]
        return rope_of_stream(stream, known) if known else None

    def _read(self, images: Sequence[Image]) -> list[Pixels]:
        """Return the pixels of images, read in threads unless they are in the cache."""
        missing = {image.digest: image for image in images if image.digest not in self._cache}
        new = dict(zip(missing, self._threads.map(self._decode, missing.values()), strict=True))
        pixels = [new[image.digest] if image.digest in new else self._cache[image.digest] for image in images]
        for image in images:
            self._cache.setdefault(image.digest, new.get(image.digest) or self._cache[image.digest])
            self._cache.move_to_end(image.digest)
        self._cache_bytes += sum(image.nbytes for image in new.values())
        while self._cache_bytes > _CACHE_BYTES:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return pixels

    def _decode(self, image: Image) -> Pixels:
        return self.family.read(image.picture())


def freeze_parts(model: Any, spec: EngineSpec) -> None:
    """Freeze the parts of a vision-language model that the role does not train.

    Raises RecipeError for parts that a model does not have.
    """
    family, trained = find_family(model.config.model_type), list_parts(spec.train)
    if family is None and trains_images(spec.train):
        fact = f"models.{spec.model_name} reads text alone, and has none of the parts {', '.join(trained)}"
        raise RecipeError(f"roles.{spec.role}.train", fact, fix="remove it")
    for name, weight in model.named_parameters():
        if family is not None and family.part_of(name) not in trained:
            weight.requires_grad_(False)


def create_vision(spec: EngineSpec, config: Any, tokenizer: "PreTrainedTokenizerBase") -> Vision | None:
    """Return how a role's model reads images, by its configuration; None for a model that reads text alone."""
    if find_family(config.model_type) is None:
        return None
    is_trained = "Trains" in spec.capabilities and not spec.lora and trains_images(spec.train)
    is_sharded = spec.world_size > spec.layout.sequence_parallel_size
    return Vision(
        load_vision(spec.model_name, spec.model, tokenizer),
        is_trained=is_trained,
        encodes_always=is_sharded and (is_trained or spec.layout.zero_stage == 3),
    )


def _check_count(placeholders: int, features: int) -> None:
    if placeholders != features:
        raise EngineError(f"a pass has {placeholders} tokens that stand for images, and its images have {features}.")
