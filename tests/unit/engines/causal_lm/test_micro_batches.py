"""Rows for each pass: within the limit, as few as can be, in equal number on all ranks."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.micro_batches import (
    PatchLimit,
    build_micro_batches,
    num_micro_batches,
    repeat_shortest_row,
    restore_order,
)
from tests.helpers import sequences

# The length of each prompt, and those of its responses.
GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=12
)


def of(groups: list[tuple[int, list[int]]]) -> Sequences:
    return sequences([prompt for prompt, _ in groups], [responses for _, responses in groups])


def lists(pieces: list[Any]) -> list[list[int]]:
    return [piece.tolist() for piece in pieces]


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [(100, [[0, 1, 2, 3]]), (13, [[2, 3], [0, 1]]), (9, [[0, 1], [2], [3]]), (1, [[2], [1], [0], [3]])],
)
def test_the_largest_first(limit: int, pieces: list[list[int]]) -> None:
    given = sequences([2], [[2, 3, 7, 1]])  # 4, 5, 9 and 3 tokens
    assert lists(build_micro_batches(given, limit)) == pieces


def test_a_row_that_is_too_long_goes_alone() -> None:
    assert lists(build_micro_batches(sequences([1], [[3, 20, 3]]), 10)) == [[1], [0, 2]]


def test_the_rows_of_a_prompt_go_together() -> None:
    """8, 8, 6, 6, 7, 7 tokens, in pairs 16, 12, 14: rows alone would mix."""
    given = sequences([4, 4, 4], [[4, 4], [2, 2], [3, 3]])
    assert lists(build_micro_batches(given, 16)) == [[0, 1], [4, 5], [2, 3]]


def test_prompts_are_divided_where_that_saves_enough_passes() -> None:
    """Three rows of 10 of each of four prompts: together they would take four passes of 30, divided they take three."""
    given = sequences([1] * 4, [[9] * 3] * 4)
    assert len(build_micro_batches(given, 40)) == 3
    # Reading a prompt of 9 tokens again costs more than that.
    assert len(build_micro_batches(sequences([9] * 4, [[1] * 3] * 4), 40)) == 4


@pytest.mark.slow
@given(groups=GROUPS, limit=st.integers(1, 120), more=st.integers(0, 9), most_patches=st.integers(1, 40))
def test_every_row_once_within_the_limit(
    groups: list[tuple[int, list[int]]], limit: int, more: int, most_patches: int
) -> None:
    """The rows of a prompt share its images in a pass."""
    batch = of(groups)
    lengths, prompts = batch.prompt_ids.lengths + batch.response_ids.lengths, batch.keys[:, 1]
    of_prompts = np.arange(len(groups)) * 7 % 20
    patches = PatchLimit(most_patches, of_prompts[prompts])
    needed = num_micro_batches(batch, limit, patches)
    pieces = build_micro_batches(batch, limit, needed + more, patches)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(batch)))
    assert all((np.diff(piece) > 0).all() for piece in pieces)
    assert all(len(piece) == 1 or lengths[piece].sum() <= limit for piece in pieces)
    shown = [np.unique(prompts[piece]) for piece in pieces]
    assert all(len(together) == 1 or of_prompts[together].sum() <= most_patches for together in shown)
    assert len(pieces) == min(needed + more, len(batch))


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [
        (100, [[0, 1, 2, 3, 4, 5]]),
        (14, [[4, 5], [0, 1, 2, 3]]),
        (7, [[4, 5], [0, 1], [2, 3]]),
        (1, [[4, 5], [0, 1], [2, 3]]),
    ],
)
def test_rows_that_are_compared_stay_in_one_pass(limit: int, pieces: list[list[int]]) -> None:
    """Pairs of 4 + 3, 3 + 4 and 8 + 6 tokens, as if each were one row."""
    given = replace(sequences([2, 1, 3], [[2, 1], [2, 3], [5, 3]]), unit_size=2)
    assert lists(build_micro_batches(given, limit)) == pieces
    # Not more of them than there are pairs.
    assert len(build_micro_batches(given, limit, 5)) == 3
    # A rank without rows works on one row of its own.
    assert lists(build_micro_batches(given.take(np.array([0])), limit)) == [[0]]


def test_images_of_a_prompt_count_once_in_a_pass() -> None:
    """Three prompts of 8 patches each and one without; a pass has 16, whose rows would fit into one by their tokens."""
    given = of([(2, [1, 1, 1])] * 4)
    patches = PatchLimit(16, np.repeat([8, 8, 8, 0], 3))
    assert len(build_micro_batches(given, 100)) == 1
    pieces = build_micro_batches(given, 100, patches=patches)
    assert sorted(map(len, pieces)) == [6, 6]
    assert all(len(set(given.keys[piece, 1]) - {3}) <= 2 for piece in pieces)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=30))
def test_no_more_passes_than_first_fit_is_bound_to(lengths: list[int]) -> None:
    """Dosa 2007: 11/9 of the fewest and 6/9, which are at least as many as the tokens fill."""
    fewest = -(-sum(lengths) // 60)
    bound = 11 / 9 * max(fewest, sum(length > 30 for length in lengths)) + 6 / 9
    assert num_micro_batches(of([(1, [length - 1]) for length in lengths]), 60) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_as_few_passes_as_can_be(seed: int) -> None:
    """No way to put six rows into passes has fewer; first-fit decreasing is exact for so few."""
    lengths = np.random.default_rng(seed).integers(2, 60, 6)
    fewest = min(
        len(set(way))
        for way in product(range(6), repeat=6)
        if (np.bincount(way, weights=lengths, minlength=6) <= 60).all()
    )
    assert num_micro_batches(of([(1, [int(length) - 1]) for length in lengths]), 60) == fewest


def test_passes_are_filled_evenly() -> None:
    given = of([(1, [length]) for length in (50, 40, 30, 20, 10, 9, 8, 7, 6, 5)])
    sizes = [int((given.response_ids.lengths[piece] + 1).sum()) for piece in build_micro_batches(given, 100, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 6


@pytest.mark.parametrize(
    ("count", "pieces", "counting"),
    [
        (1, [[0, 1, 2, 3]], 1),
        (2, [[1, 3], [0, 2]], 2),
        (4, [[1], [0], [2], [3]], 4),
        (6, [[1], [0], [2], [3], [3], [3]], 4),
    ],
)
def test_as_many_as_the_other_ranks(count: int, pieces: list[list[int]], counting: int) -> None:
    """5, 9, 4 and 3 tokens. The shortest row is repeated where there are too few."""
    given = sequences([2], [[3, 7, 2, 1]])
    ours, number = repeat_shortest_row(build_micro_batches(given, 100, count), given, count)
    assert lists(ours) == pieces
    assert number == counting


def test_results_come_back_in_the_order_of_the_batch() -> None:
    response_ids = sequences([1], [[2, 3, 1]]).response_ids
    numbers = response_ids.like(np.arange(6, dtype=np.float32))
    pieces = [np.array([1]), np.array([0, 2])]
    back = restore_order(response_ids, pieces, [numbers.take(piece).values for piece in pieces])
    assert back.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert back.offsets.tolist() == [0, 2, 5, 6]
