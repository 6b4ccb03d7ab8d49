"""Generated digits: an image shows its answer, and nothing else does."""

import numpy as np
import pytest

from rlflow.batch import Image
from rlflow.data.digits import digits


def shape_of(encoded: bytes) -> str:
    """Return the bright points of an image, without its dark borders."""
    bright = np.asarray(Image(encoded, 16, 16).picture()).min(2) > 0.4 * 255
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    cut = bright[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return "\n".join("".join(".#"[point] for point in row) for row in cut.astype(int))


def test_images_show_their_answers() -> None:
    rows = digits("test")
    shapes = {(row["answer"], shape_of(row["images"][0])) for row in rows}
    assert sorted(answer for answer, _ in shapes) == list("0123456789")
    assert ("7", "#####\n....#\n...#.\n..#..\n.#...\n.#...\n.#...") in shapes
    assert {row["prompt"] for row in rows} == {"read:"}


def test_exchanged_images_show_other_answers() -> None:
    rows, exchanged = digits("test"), digits("test", exchanged=True)
    assert [row["images"] for row in exchanged] == [row["images"] for row in rows[1:] + rows[:1]]
    assert [row["answer"] for row in exchanged] == [row["answer"] for row in rows]


def test_splits_share_no_image() -> None:
    train, test = ({row["images"][0] for row in digits(split)} for split in ("train", "test"))
    assert (len(train), len(test)) == (8192, 512)
    assert not train & test
    with pytest.raises(ValueError, match="expected the split train or test, got 'both'"):
        digits("both")
