"""The sizes of pools that share a cluster: pinned ones, and a grid for open pools, the last of which gets the rest."""

from collections.abc import Sequence
from functools import cache
from math import comb

from rlflow.resources.planner.search.pool_pins import PoolPins

# A cluster is divided into so many parts to get the sizes of pools.
_SHARES = 16
# The parts are larger if the pools could have more combinations of sizes.
_MOST_SIZES = 6000
# The fewest GPUs of more open pools at once are left to the placement where no other size fits.
_FEW_POOLS = 4


def pool_sizes(pins: Sequence[PoolPins], limits: Sequence[int], total: int) -> list[tuple[int, ...]]:
    """Return all combinations of sizes, of at most ``limits`` GPUs for each pool and ``total`` for all.

    A single open pool is tried with all of its GPUs, a half, a quarter, and so on.
    """
    # Pools with pinned sizes come first, so that the last open pool gets the rest.
    order = sorted(range(len(pins)), key=lambda index: pins[index].sizes is None)
    least = [pool.least if pool.sizes is None else min(pool.sizes, default=0) for pool in pins]
    num_open = sum(pool.sizes is None for pool in pins)
    grain = _grain(num_open, total)

    @cache
    def next_sizes(place: int, taken: int) -> list[int]:
        """Return the sizes of a pool at a place in the order, after pools that have taken so many GPUs."""
        index, later = order[place], order[place + 1 :]
        lowest, pinned = least[index], pins[index].sizes
        highest = min(limits[index], total - taken - sum(least[pool] for pool in later))
        if pinned is not None:
            tried = set(pinned)
        elif len(pins) == 1:
            tried = {highest >> halvings for halvings in range(highest.bit_length())}
        elif not later:
            tried = {highest}
        else:
            tried = set(range(-(-lowest // grain) * grain, highest + 1, grain))
            tried |= {lowest} if num_open <= _FEW_POOLS or lowest > 1 else set()
            tried |= {highest} if highest == limits[index] else set()
        return sorted(size for size in tried if max(1, lowest) <= size <= highest)

    combinations: list[tuple[int, ...]] = [()]
    for place in range(len(pins)):
        combinations = [(*sizes, size) for sizes in combinations for size in next_sizes(place, sum(sizes))]
    places = [order.index(index) for index in range(len(pins))]
    return [tuple(sizes[place] for place in places) for sizes in combinations]


def _grain(pools: int, total: int) -> int:
    """Return the step between sizes of a pool: sixteenths of the GPUs, or larger parts for many pools."""
    grain = max(1, 2 ** ((total // _SHARES).bit_length() - 1)) if total > _SHARES else (1 if total <= 8 else 2)
    while pools > 2 and total // grain >= 2 * pools and comb(total // grain - 1, pools - 1) > _MOST_SIZES:
        grain *= 2
    return grain
