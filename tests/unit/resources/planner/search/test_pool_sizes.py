"""The sizes of pools, counted by hand."""

from math import comb

from rlflow.resources.planner.search.pool_pins import PoolPins
from rlflow.resources.planner.search.pool_sizes import pool_sizes


def pins(*sizes: int) -> PoolPins:
    """Return what a pool of one of these sizes pins; without any, a pool of any size."""
    return PoolPins(frozenset(sizes) or None, None, ((1, 1),))


def test_sizes() -> None:
    assert pool_sizes([pins()], [8], 8) == [(1,), (2,), (4,), (8,)]
    assert pool_sizes([pins(), pins()], [4, 4], 4) == [(1, 3), (2, 2), (3, 1)]
    assert (12, 4) in pool_sizes([pins(), pins()], [16, 16], 16)
    assert pool_sizes([pins(4), pins()], [16, 16], 16) == [(4, 12)]
    assert pool_sizes([pins(4), pins(12)], [16, 16], 16) == [(4, 12)]
    assert pool_sizes([pins(4), pins(16)], [16, 16], 16) == []
    assert all(sum(split) == 63 for split in pool_sizes([pins()] * 3, [63] * 3, 63))


def test_sizes_within_the_hosts_of_a_label() -> None:
    """One pool may have 5 of the 12 GPUs, the other the 7 others."""
    found = pool_sizes([pins(), pins()], [5, 7], 12)
    assert (5, 7) in found
    assert all(first <= 5 and second <= 7 for first, second in found)


def test_sizes_from_the_least_on() -> None:
    """The least of a pool is tried even where it is not on the grid, and the others keep at least theirs."""
    some = [PoolPins(None, None, ((3, 1),)), PoolPins(None, None, ((1, 5), (2, 1)))]
    assert pool_sizes(some, [12, 12], 12) == [(3, 9), (4, 8), (6, 6)]
    assert pool_sizes(some, [12, 12], 7) == []


def test_ten_pools_of_a_thousand_gpus() -> None:
    """Every role by itself: 16 parts for 10 pools, of which 9 borders are chosen among 15 places."""
    found = pool_sizes([pins()] * 10, [1024] * 10, 1024)
    assert len(found) == comb(15, 9)
    assert all(sum(sizes) == 1024 for sizes in found)
