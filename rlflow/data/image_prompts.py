"""Prompts with images: where an image stands in the text, and the tokens that stand for it.

In text, ``<image>`` stands for an image, whatever form the data set has. A chat template gets either parts of messages
or the text of the model's placeholder, and each placeholder becomes as many tokens as the image's size asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Image, Packed
from rlflow.data.chat_template import TemplateError, render_all
from rlflow.data.images import ImageSource
from rlflow.data.messages import IMAGE_TAG, is_conversation
from rlflow.data.mistakes import row_error
from rlflow.errors import RecipeError
from rlflow.recipe import Data

if TYPE_CHECKING:
    from rlflow.engines.vision.base import VisionFamily

Ids = NDArray[np.int32]
Images = tuple[ImageSource, ...]
Message = Mapping[str, Any]
_PROBE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


@dataclass(frozen=True, eq=False)
class ImagePrompts:
    """The images of all rows, and the model that reads them."""

    data: Data
    vision: "VisionFamily"
    images: Sequence[Images]
    """[P]"""

    def tagged(self, prompts: Sequence[Any]) -> list[Any]:
        """Return the prompts with a tag for each image; those without tags have all images before the first text.

        Raises RecipeError for a prompt with another number of tags.
        """
        return [self._tagged(row, prompt) for row, prompt in enumerate(prompts)]

    def as_text(self, text: str) -> str:
        """Return a tagged text with the model's own placeholders."""
        return text.replace(IMAGE_TAG, self.vision.placeholder)

    def for_template(self, render: Callable[[Any], str]) -> Callable[[Sequence[Message]], list[Message]]:
        """Return how messages are passed on to the chat template that ``render`` applies.

        Some templates want parts, others know only texts. A template may also do neither.
        """
        token = str(self.vision.tokenizer.convert_ids_to_tokens(self.vision.placeholder_id))
        try:
            takes_parts = render_all(render, [_PROBE])[0].count(token) == 1
        except TemplateError:
            takes_parts = False
        content = _as_parts if takes_parts else self.as_text
        return lambda messages: [
            {**message, "content": content(message["content"])} if message.get("content") else message
            for message in messages
        ]

    def expand(self, ids: Packed) -> Packed:
        """Return the tokens of prompts with each placeholder as the tokens of its image. Raises RecipeError."""
        is_media = ids.like(np.isin(ids.values, list(self.vision.media_ids)))
        pieces = (self._expand(row, ids[row], is_media[row]) for row in range(len(ids)))
        return Packed.from_rows(pieces, np.int32)

    def check_responses(self, name: str, ids: Packed) -> None:
        """Raise RecipeError for a response with a token that stands for media: a model would have to generate it."""
        if (places := np.flatnonzero(np.isin(ids.values, list(self.vision.media_ids)))).size:
            row = int(np.searchsorted(ids.offsets, places[0], side="right")) - 1
            token = self.vision.tokenizer.convert_ids_to_tokens(int(ids.values[places[0]]))
            raise row_error(self.data, row, f"has '{token}' in its '{name}', which no model may generate")

    def _tagged(self, row: int, prompt: Any) -> Any:
        messages = prompt if is_conversation(prompt) else [{"role": "user", "content": str(prompt)}]
        count = len(self.images[row])
        tags = sum(str(message.get("content")).count(IMAGE_TAG) for message in messages)
        if tags == count:
            return prompt
        if tags:
            fact = f"has {tags} {IMAGE_TAG} in its prompt and {count} images"
            raise row_error(self.data, row, fact, f"write one {IMAGE_TAG} for each image, or none at all")
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise row_error(self.data, row, "has images and no message of a user")
        with_tags = f"{IMAGE_TAG * count}{messages[first].get('content') or ''}"
        if not is_conversation(prompt):
            return with_tags
        return [*messages[:first], {**messages[first], "content": with_tags}, *messages[first + 1 :]]

    def _expand(self, row: int, ids: Ids, is_media: NDArray[np.bool_]) -> Ids:
        images, vision = self.images[row], self.vision
        media = ids[is_media]
        if len(media) != len(images) or (media != vision.placeholder_id).any():
            tokens = ", ".join(dict.fromkeys(map(str, vision.tokenizer.convert_ids_to_tokens(media.tolist()))))
            if len(media) < len(images):
                fact = f"has {len(images)} images, of which the chat template shows {len(media)}"
                raise row_error(self.data, row, fact, "a chat template that shows images: models.NAME.chat_template")
            fact = f"has a text with a token that stands for images or videos ({tokens})"
            raise row_error(self.data, row, fact, f"remove it from the text; {IMAGE_TAG} stands for an image")
        if not len(images):
            return ids
        text = np.split(ids, np.flatnonzero(is_media))
        rest = [piece for image, part in zip(images, text[1:], strict=True) for piece in (self._ids(image), part[1:])]
        return np.concatenate([text[0], *rest])

    def _ids(self, image: ImageSource) -> Ids:
        return self.vision.image_ids(image.width, image.height)


def check_truncation(data: Data) -> None:
    """Raise RecipeError for data with images whose prompts may be shortened, which would cut images to pieces."""
    if data.overlong == "truncate_left":
        fact = f"'{data.source}' has images, which cannot be shortened"
        raise RecipeError("data.overlong", fact, known=("error", "drop"), fix="data.overlong=drop")


def shown_text(ids: Ids, images: Sequence[Image], vision: "VisionFamily", decode: Callable[[Ids], str]) -> str:
    """Return the text of a prompt for people, with the size of each image in place of its tokens."""
    text, start = "", 0
    for image in images:
        tokens = vision.image_ids(image.width, image.height)
        ends = (start + np.flatnonzero(ids[start:] == tokens[0]) + len(tokens)).tolist()
        end = next((end for end in ends if np.array_equal(ids[end - len(tokens) : end], tokens)), start)
        if end > start:
            text += f"{decode(ids[start : end - len(tokens)])}[image {image.width}x{image.height}]"
            start = end
    return text + decode(ids[start:])


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a text with tags as parts of a message."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE_TAG)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts
