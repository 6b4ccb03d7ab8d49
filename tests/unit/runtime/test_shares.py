"""Rows to ranks."""

from itertools import product

import numpy as np
import pytest

from rlflow.runtime.shares import shares
from tests.helpers import sequences


def test_every_row_once_in_the_order_of_the_batch() -> None:
    parts = shares(sequences([3, 2, 4, 1, 5], [[1, 2], [9], [4, 4, 4], [1], [2]]), 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_the_rollouts_of_a_prompt_stay_together() -> None:
    """Tokens by prompt: 2 x (3 + 5) = 16, 2 x (3 + 1) = 8, 2 x (3 + 2) = 10; so 16 against 8 + 10."""
    parts = shares(sequences([3, 3, 3], [[5, 5], [1, 1], [2, 2]]), 2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]


def test_fewer_prompts_than_shares_are_cut() -> None:
    parts = shares(sequences([2], [[6, 1, 1, 1]]), 2)
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3]]


def test_fewer_rows_than_shares_leave_some_empty() -> None:
    assert [part.tolist() for part in shares(sequences([2], [[6]]), 3)] == [[0], [], []]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 3])
def test_the_fullest_share_is_within_the_bound_of_lpt(count: int, seed: int) -> None:
    """Graham 1969: at most 4/3 - 1/(3m) of the best, which is found here by trying all."""
    sizes = [int(size) for size in np.random.default_rng(seed).integers(1, 400, 7)]
    parts = shares(sequences([1] * 7, [[size] for size in sizes]), count)
    fullest = max(sum(sizes[row] + 1 for row in part) for part in parts)
    best = min(
        max(
            sum(size + 1 for size, owner in zip(sizes, owners, strict=True) if owner == share) for share in range(count)
        )
        for owners in product(range(count), repeat=7)
    )
    assert fullest <= (4 / 3 - 1 / (3 * count)) * best
