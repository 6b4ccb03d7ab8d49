"""How many GPUs each pool may get."""

from collections.abc import Iterator, Sequence
from itertools import product

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand

# Of open degrees.
_GROUPS = [1, 2, 4, 8]
# So many shares of a cluster are tried as sizes of pools.
_SHARES = 16


def wanted_gpus(demands: Sequence[Demand]) -> frozenset[int] | None:
    """The sizes that a pool's roles pin; None: any. A role of fewer copies uses a part of it.

    Raises PlacementError when they pin different numbers of GPUs.
    """
    pinned = {demand.role: gpus for demand in demands if (gpus := demand.pinned("gpus")) is not None}
    if len(set(pinned.values())) > 1:
        less, more = min(pinned, key=lambda role: pinned[role]), max(pinned, key=lambda role: pinned[role])
        raise PlacementError(
            f"roles.{more}.gpus",
            f"{more} and {less} share GPUs, but ask for {pinned[more]} and {pinned[less]} of them",
            fix=f"ask for the same number, or give {more} its own with colocate=[]",
        )
    if pinned:
        return frozenset(pinned.values())
    needed = [sizes for demand in demands if (sizes := _sizes_of(demand)) is not None]
    if not needed:
        return None
    least = max(min(sizes) for sizes in needed)
    return frozenset(size for sizes in needed for size in sizes if size >= least)


def _sizes_of(demand: Demand) -> frozenset[int] | None:
    """By its data-parallel size, where that is pinned."""
    copies = demand.pinned("data_parallel_size")
    if copies is None or "data" not in demand.parallel:
        return None
    stages = demand.pinned("pipeline_parallel_size") or 1
    tensor, sequence = (
        [pinned] if (pinned := demand.pinned(f"{way}_parallel_size")) else _GROUPS for way in ("tensor", "sequence")
    )
    return frozenset(copies * stages * one * other for one in tensor for other in sequence)


def sizes(
    wanted: Sequence[frozenset[int] | None], most: Sequence[int], total: int, *, coarse: bool = False
) -> Iterator[tuple[int, ...]]:
    """GPUs of each pool: one of those it pins (None: any), no more than its hosts have, all together ``total`` at most.

    Pools that are open share what is left on a grid, or on a ``coarse`` one. One pool alone is also tried with a half
    of it, a quarter, ...
    """
    if list(wanted) == [None]:
        yield from ((most[0] >> halvings,) for halvings in range(1 if coarse else most[0].bit_length()))
        return
    grain = max(1, 2 ** ((total // _SHARES).bit_length() - 1)) if total > _SHARES else (1 if total <= 8 else 2)
    if len(wanted) > 2 and total > 8:
        grain = max(grain, 2 ** ((total // 8).bit_length() - 1))
    if coarse:
        grain = max(grain, 2 ** ((total // 4).bit_length() - 1))
    free = [limit for limit, size in zip(most, wanted, strict=True) if size is None]
    for pinned in product(*(sorted(size) for size in wanted if size is not None)):
        left = total - sum(pinned)
        if left < 0 or (free and left < len(free)):
            continue
        for shares in _shares(left, free, grain):
            given, open_ = iter(pinned), iter(shares)
            yield tuple(next(given) if size is not None else next(open_) for size in wanted)


def _shares(left: int, most: Sequence[int], grain: int) -> Iterator[tuple[int, ...]]:
    """For each pool a multiple of the grain or all that its hosts have; for the last what is left."""
    if not most:
        yield ()
    elif len(most) == 1:
        yield (min(left, most[0]),)
    else:
        highest = min(most[0], left - len(most) + 1)
        firsts = list(range(grain, highest + 1, grain))
        for first in [*firsts, *([highest] if highest == most[0] and highest % grain else [])]:
            for others in _shares(left - first, most[1:], grain):
                yield (first, *others)
