"""Columns of images, and the batches that must not lose them."""

import pickle
from dataclasses import replace
from io import BytesIO

import numpy as np

from rlflow.batch import Image, Packed, Repeated, SharedRows, images_of, pack_images
from rlflow.batch.files import read_rollouts, write_rollouts
from rlflow.batch.segments import unfold
from tests.helpers import minibatch, prompts, rollouts, sequences

IMAGES = ((Image(b"first", 640, 480), Image(b"", 1, 2)), (), (Image(b"third" * 100, 16, 16),))


def rows_of(column: Packed | None) -> list[tuple[Image, ...]]:
    assert column is not None
    return [images_of(column, row) for row in range(len(column))]


def test_rows_of_images() -> None:
    column = pack_images(IMAGES)
    assert rows_of(column) == list(IMAGES)
    assert rows_of(Packed(column.values, column.offsets)) == list(IMAGES)
    assert rows_of(Packed.concatenate([column.take(np.array([2, 2])), column])) == [IMAGES[2], IMAGES[2], *IMAGES]
    assert IMAGES[0][0].digest == Image(b"first", 1, 1).digest != IMAGES[2][0].digest


def test_repeated_prompts_share_their_images() -> None:
    repeated = replace(prompts(), images=pack_images(IMAGES)).repeat(8)
    assert isinstance(repeated.images, SharedRows)
    assert len({id(row) for row in repeated.images.rows}) == 3
    sent = pickle.dumps(repeated)
    assert sent.count(b"third" * 100) == 1
    assert rows_of(pickle.loads(sent).images) == [images for images in IMAGES for _ in range(8)]


def test_no_step_loses_images() -> None:
    of = replace(sequences([3, 2, 4], [[1, 2], [3, 1], [2, 2]]), images=pack_images(IMAGES).take(np.arange(6) // 2))
    expected = [IMAGES[row // 2] for row in range(6)]
    assert rows_of(replace(rollouts(of), images=of.images).as_sequences().images) == expected
    assert rows_of(minibatch(of).images) == expected
    counts, numbers = np.array([2, 1, 1, 1, 1, 1]), np.array([0, 1, 0, 0, 0, 0, 0], np.int32)
    prompt_lengths, lengths = of.prompt_ids.lengths, of.response_ids.lengths
    cut = replace(
        of,
        prompt_segments=Repeated(numbers, np.array([1, 2, *prompt_lengths[1:]]), counts),
        response_segments=Repeated(numbers, np.array([0, 1, *lengths[1:]]), counts),
    )
    assert rows_of(unfold(cut).images) == [expected[0], *expected]


def test_files_hold_no_images() -> None:
    of = rollouts(replace(sequences([3], [[1, 2]]), images=pack_images([IMAGES[2]] * 2)))
    buffer = BytesIO()
    write_rollouts(buffer, of, of.rows)
    assert b"third" not in buffer.getvalue()
    buffer.seek(0)
    assert read_rollouts(buffer).images is None
