"""Images in rows of a data set: read once to check them, and afterwards by reference until a step needs them.

A stranger may have made them. Only their headers are decoded here: a few bytes may claim any number of pixels.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rlflow.batch import Image
from rlflow.batch.images import FORMATS
from rlflow.data.messages import IMAGE_TAG
from rlflow.data.mistakes import Rows, row_error
from rlflow.errors import EngineError, RecipeError, first_line
from rlflow.extras import check_extra, installed
from rlflow.recipe import Data

IMAGES = "images"
"""The column with the images of a row, as a tuple of ImageSource."""
_COLUMNS = (IMAGES, "image")
_MAX_BYTES = 2**27
# Orientations of a camera, in EXIF, that exchange width and height.
_TURNED, _ORIENTATION = frozenset({5, 6, 7, 8}), 0x0112


@dataclass(frozen=True)
class ImageSource:
    """An image of a data set: its bytes, or the file that has them."""

    source: bytes | Path = field(repr=False)
    width: int
    height: int
    digest: str

    def __str__(self) -> str:
        """Return what tells the image from any other, which describes the rows of a run."""
        return self.digest

    def read(self) -> Image:
        """Return the image. Raises EngineError if its file has changed since it was checked."""
        try:
            encoded = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        except OSError as error:
            raise EngineError(f"data: the image '{self.source!s}' cannot be read ({first_line(error)}).") from None
        image = Image(encoded, self.width, self.height)
        if image.digest != self.digest:
            raise EngineError(f"data: the image '{self.source!s}' has changed since the run started.")
        return image


class _ImageError(Exception):
    """An image cannot be used; the message continues a sentence about its row."""

    def __init__(self, fact: str, fix: str) -> None:
        super().__init__(fact)
        self.fix = fix


def read_images(data: Data, rows: Rows) -> Rows:
    """Return the rows with their images as a tuple of ImageSource; the rows themselves if none has an image.

    Raises RecipeError with the row of an image that cannot be used.
    """
    columns = [name for name in _COLUMNS if any(_values(row.get(name)) for row in rows)]
    if not columns:
        return rows
    if installed("pillow") is None:
        check_extra("pillow", f"data.columns.{columns[0]}", f"the column '{columns[0]}' of '{data.source}'")
    if len(columns) > 1:
        fact = f"'{data.source}' has images in two columns, 'images' and 'image'"
        raise RecipeError("data.columns", fact, fix="name one of them: {images: COLUMN, image: OTHER}")
    folder = _folder_of(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow warns of what is refused here
        read = [_read_row(data, folder, number, row[columns[0]]) for number, row in enumerate(rows)]
    return [
        {**{name: value for name, value in row.items() if name not in _COLUMNS}, IMAGES: images}
        for row, images in zip(rows, read, strict=True)
    ]


def without_images(data: Data, rows: Rows) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows for a model that reads text alone, without encoded images, and a warning if they had any.

    Raises RecipeError if the recipe names a column of images, or a prompt has a place for one.
    """
    if asked := next((name for name in _COLUMNS if name in data.columns), None):
        fix = "a vision-language model, or remove the column"
        raise RecipeError(f"data.columns.{asked}", "names images, and the model reads text alone", fix=fix)
    shown = [[name for name in _COLUMNS if any(_values(row.get(name)))] for row in rows]
    for number, (row, columns) in enumerate(zip(rows, shown, strict=True)):
        if columns and IMAGE_TAG in str(row.get("prompt")):
            fact = f"has {IMAGE_TAG} in its prompt, and the model reads text alone"
            raise row_error(data, number, fact, "a vision-language model, or remove the row")
    # A text may be anything, such as the name of a container.
    encoded = {name for row, columns in zip(rows, shown, strict=True) for name in columns if not _is_text(row[name])}
    if not encoded:
        return rows, ()
    warning = f"data.columns: '{data.source}' has images in '{min(encoded)}', and the model reads text alone"
    return [{name: value for name, value in row.items() if name not in encoded} for row in rows], (warning,)


def images_by_digest(rows: Rows) -> dict[str, ImageSource]:
    """Return all images of rows that ``read_images`` returned."""
    return {image.digest: image for row in rows for image in row.get(IMAGES) or ()}


def _folder_of(data: Data) -> Path | None:
    """Return the folder that images may lie in: that of a data set on this machine."""
    path = Path(os.path.expanduser(data.source))
    if path.is_dir():
        return path.resolve()
    return path.resolve().parent if path.is_file() else None


def _values(value: Any) -> Sequence[Any]:
    """Return the images of a row as a sequence, whether it has none, one or several."""
    if value is None or value == "":
        return ()
    return [item for item in value if item is not None] if isinstance(value, list | tuple) else (value,)


def _is_text(value: Any) -> bool:
    return all(isinstance(item, str) for item in _values(value))


def _read_row(data: Data, folder: Path | None, number: int, value: Any) -> tuple[ImageSource, ...]:
    values, limit = _values(value), data.image.max_per_prompt
    if len(values) > limit:
        fix = f"data.image.max_per_prompt={len(values)}, or remove the row"
        raise row_error(data, number, f"has {len(values)} images, more than {limit}", fix)
    try:
        return tuple(_read_image(item, folder, data.image.max_pixels) for item in values)
    except _ImageError as error:
        raise row_error(data, number, str(error), error.fix) from None


def _read_image(value: Any, folder: Path | None, max_pixels: int) -> ImageSource:
    """Check an image without decoding it: bytes, a path, or a mapping with either, as Parquet files have them."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return _check(value, value, max_pixels)
    if not isinstance(value, str):
        fact = f"has an image that is neither bytes nor a path ({type(value).__name__})"
        raise _ImageError(fact, "save it as a file, or as PNG or JPEG in bytes")
    file = _file(value, folder)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise _ImageError(
                f"has an image of more than {_MAX_BYTES >> 20} MiB ('{value}')", "save it with fewer bytes"
            )
        return _check(file, file.read_bytes(), max_pixels)
    except OSError as error:
        fact = f"names the image '{value}', which cannot be read ({first_line(error)})"
        raise _ImageError(fact, "correct the path, or remove the row") from None


def _file(value: str, folder: Path | None) -> Path:
    """Return the file that a row names, which must be inside of the data set's folder."""
    if (scheme := urlparse(value).scheme) and len(scheme) > 1:
        raise _ImageError(f"names an image by its address ('{value[:80]}')", "download it into the data set's folder")
    if folder is None:
        fact = f"names the image '{value[:80]}', and the data set is no folder of this machine"
        raise _ImageError(fact, "save the images in the rows, as bytes")
    file = (folder / value).resolve()
    if not file.is_relative_to(folder):
        fact = f"names the image '{value[:80]}', which is outside of the data set's folder"
        raise _ImageError(fact, f"copy it into '{folder}'")
    return file


def _check(source: bytes | Path, encoded: bytes, max_pixels: int) -> ImageSource:
    """Return the source with the size that the image has when it is shown."""
    import PIL.Image

    try:
        with PIL.Image.open(BytesIO(encoded), formats=FORMATS) as header:
            (width, height), kind = header.size, str(header.format)
            # Without these bytes, pillow would decode a PNG to look behind its pixels.
            if "exif" in header.info and header.getexif().get(_ORIENTATION) in _TURNED:
                width, height = height, width
    except PIL.Image.DecompressionBombError:
        width = height = max_pixels
    except Exception as error:  # pillow raises errors of many kinds
        fact = f"has an image that cannot be read ({first_line(error).partition(' <')[0]})"
        raise _ImageError(fact, f"save it as {', '.join(FORMATS)}, or remove the row") from None
    if width * height > max_pixels:
        fact = f"has an image of more than {max_pixels} pixels"
        raise _ImageError(fact, "scale it down, remove the row, or raise data.image.max_pixels")
    if not _is_complete(kind, encoded):
        raise _ImageError(f"has an image that is cut off ({kind}, {len(encoded)} bytes)", "copy or download it again")
    return ImageSource(source, width, height, Image(encoded, width, height).digest)


def _is_complete(kind: str, encoded: bytes) -> bool:
    """Return whether an image has its end, as its format marks it."""
    if kind == "PNG":
        return b"IEND" in encoded
    if kind == "WEBP":
        return int.from_bytes(encoded[4:8], "little") + 8 <= len(encoded)
    if kind == "GIF":
        return encoded.rstrip(b"\0").endswith(b";")
    # A thumbnail in the header of a JPEG has an end of its own.
    place = 2
    while place + 4 <= len(encoded) and encoded[place + 1] != 0xDA:
        place += 1 if encoded[place + 1] == 0xFF else 2 + int.from_bytes(encoded[place + 2 : place + 4], "big")
    return encoded.rfind(b"\xff\xd9", place) >= 0
