"""Generated images of digits, which a tiny vision-language model learns to read on a laptop.

The prompt of every row is the same, so that only the image tells the answer.
"""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Each digit in seven rows of five points.
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_SHAPES = np.array([[list(map(int, row)) for row in shape.split()] for shape in _FONT])
_SIDE = 16
_COUNTS = {"train": 8192, "test": 512}
# The brightness of a digit, and the largest brightness of noise.
_BRIGHTNESS, _NOISE = (0.5, 0.85), 0.15
# Digits are moved by up to so many pixels, as far as the image goes, so that most are in a corner.
_LARGEST_SHIFT = 90


def digits(split: str, seed: int = 0, exchanged: bool = False) -> list[dict[str, Any]]:
    """Return images of one digit each, with the digit as the answer.

    With ``exchanged``, each row has the image of the next one: a model that reads them gets a tenth of them right.
    Raises ValueError for another split.
    """
    if split not in _COUNTS:
        raise ValueError(f"expected the split train or test, got '{split}'")
    draw = np.random.default_rng([seed, list(_COUNTS).index(split)])
    answers = draw.integers(10, size=_COUNTS[split])
    images = [_encode(_picture(int(answer), draw)) for answer in answers]
    shown = images[1:] + images[:1] if exchanged else images
    return [
        {"prompt": "read:", "images": [image], "answer": str(answer)}
        for answer, image in zip(answers, shown, strict=True)
    ]


def _picture(digit: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Return a coloured digit on noise, [height, width, 3], mostly in a corner."""
    values = draw.uniform(0, _NOISE, (_SIDE, _SIDE, 3))
    shape = _SHAPES[digit]
    height, width = shape.shape
    top, left = (
        int(np.clip(draw.integers(-_LARGEST_SHIFT, _LARGEST_SHIFT), 0, _SIDE - size)) for size in (height, width)
    )
    values[top : top + height, left : left + width] += shape[:, :, None] * draw.uniform(*_BRIGHTNESS, 3)
    return np.asarray(values * 255, np.uint8)


def _encode(picture: NDArray[np.uint8]) -> bytes:
    import PIL.Image

    buffer = BytesIO()
    PIL.Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
