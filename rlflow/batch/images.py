"""Images of prompts, as a column of a batch: encoded as in the data set, never as pixels.

A row holds the images of one prompt, each with its size in front. Rows that repeat a prompt share one array.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.packed import Packed, Rows, offsets_of
from rlflow.errors import EngineError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Bytes = NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats of images, by their names in pillow. Of an animation, the first picture counts."""

# The bytes of an image, its width and its height.
_HEADER = Struct("<III")
_DIGEST_BYTES = 16
_THUMBNAIL_SIDE = 96


@dataclass(frozen=True)
class Image:
    """An image as it is in its file, with its size in pixels."""

    encoded: bytes
    width: int
    height: int

    @cached_property
    def digest(self) -> str:
        """Return what tells the image from any other."""
        return blake2b(self.encoded, digest_size=_DIGEST_BYTES).hexdigest()

    def picture(self) -> "Picture":
        """Decode the image, upright and in RGB. Raises EngineError for bytes that are damaged."""
        import PIL.Image
        import PIL.ImageOps

        try:
            with PIL.Image.open(BytesIO(self.encoded), formats=FORMATS) as opened:
                upright = PIL.ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
                picture = upright.convert("RGB")
        except Exception as error:  # pillow raises errors of many kinds
            raise EngineError(f"the image {self.digest} cannot be decoded ({first_line(error)}).") from error
        if picture.size != (self.width, self.height):
            raise EngineError(f"the image {self.digest} has {picture.size} pixels, not {(self.width, self.height)}.")
        return picture

    def thumbnail(self) -> "Thumbnail":
        """Return a small picture of the image. Raises EngineError for bytes that are damaged."""
        picture, buffer = self.picture(), BytesIO()
        picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        picture.save(buffer, "JPEG")
        return Thumbnail(self.digest, self.width, self.height, buffer.getvalue())


@dataclass(frozen=True)
class Thumbnail:
    """A small picture of an image, for people."""

    digest: str
    """The digest of the image."""
    width: int
    """The width of the image in pixels, and below its height."""
    height: int
    encoded: bytes = field(repr=False)
    """The small picture as JPEG."""


class SharedRows(Packed):
    """A column that holds an array for each row. Rows that are taken more than once share theirs."""

    def __init__(self, rows: Sequence[Bytes]) -> None:
        self.rows = tuple(rows)

    @classmethod
    def _concatenate(cls, parts: Sequence[Any]) -> Packed:
        return SharedRows([row for part in parts for row in part.rows])

    @cached_property
    def values(self) -> Bytes:
        return np.concatenate([np.zeros(0, np.uint8), *self.rows])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        return offsets_of([len(row) for row in self.rows])

    def __getitem__(self, row: int) -> Bytes:
        return self.rows[row]

    def take(self, rows: Rows) -> "SharedRows":
        return SharedRows([self.rows[row] for row in rows])

    def distinct(self) -> tuple["SharedRows", NDArray[np.int64]]:
        """Return the column with each array once, and for each row which of these is its own, [rows]."""
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(id(row), len(numbers)) for row in self.rows]
        arrays = {id(row): row for row in self.rows}
        return SharedRows(list(arrays.values())), np.array(places, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedRows, (self.rows,)


def pack_images(rows: Sequence[Sequence[Image]]) -> SharedRows:
    """Return a column with the images of each prompt, which may have none."""
    return SharedRows([np.frombuffer(_pack(images), np.uint8) for images in rows])


def images_of(column: Packed, row: int) -> tuple[Image, ...]:
    """Return the images of one row."""
    packed = column[row].tobytes()
    images, start = [], 0
    while start < len(packed):
        length, width, height = _HEADER.unpack_from(packed, start)
        start += _HEADER.size
        images.append(Image(packed[start : start + length], width, height))
        start += length
    return tuple(images)


def image_digests(column: Packed) -> list[tuple[str, ...]]:
    """Return the digests of the images of each row."""
    return [tuple(image.digest for image in images_of(column, row)) for row in range(len(column))]


def _pack(images: Sequence[Image]) -> bytes:
    return b"".join(_HEADER.pack(len(i.encoded), i.width, i.height) + i.encoded for i in images)
