"""Ways for roles to share GPUs: which roles form a pool, and how many GPUs each pool may have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb, prod

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand

Partition = tuple[tuple[str, ...], ...]
"""The pools, each with its roles, sorted."""

# Up to so many blocks of roles, all ways to share are tried; beyond, those that are common in practice.
_ALL_PARTITIONS = 4


def pool_indices(partition: Partition) -> dict[str, int]:
    """Return the index of each role's pool."""
    return {role: index for index, pool in enumerate(partition) for role in pool}


def sharing_partitions(demands: Sequence[Demand]) -> list[Partition]:
    """Return the ways to share GPUs that the recipe allows. Raises PlacementError for contradicting ``colocate``."""
    blocks = _blocks(demands)
    alone = {demand.role for demand in demands if demand.pins.colocate == ()}
    fixed = {demand.role for demand in demands if demand.pins.colocate != "auto"}
    closed = [block for block in blocks if set(block) & fixed]
    loose = [block for block in blocks if not set(block) & fixed]
    # Other roles may join roles that name each other, but not a role that wants its own GPUs.
    joinable = [block for block in closed if not set(block) & alone]
    separate = [block for block in closed if set(block) & alone]
    found = set()
    ways = (
        _all_ways([*joinable, *loose])
        if len(joinable) + len(loose) <= _ALL_PARTITIONS
        else _usual_ways([*joinable, *loose], demands)
    )
    for way in ways:
        found.add(
            tuple(
                sorted(
                    tuple(sorted(role for block in pool for role in block)) for pool in [*way, *[[b] for b in separate]]
                )
            )
        )
    return sorted(found, key=lambda way: (len(way), way))


def _blocks(demands: Sequence[Demand]) -> list[tuple[str, ...]]:
    """Group roles that name one another. Raises PlacementError where one of them wants GPUs of its own."""
    alone = {demand.role for demand in demands if demand.pins.colocate == ()}
    for demand in demands:
        for other in () if demand.pins.colocate == "auto" else demand.pins.colocate:
            if other in alone:
                raise PlacementError(
                    f"roles.{demand.role}.colocate",
                    f"names {other}, which must have GPUs of its own (roles.{other}.colocate=[])",
                    fix=f"roles.{other}.colocate=auto",
                )
    merged: list[set[str]] = []
    for demand in demands:
        company = {demand.role, *(() if demand.pins.colocate == "auto" else demand.pins.colocate)}
        touching = [other for other in merged if other & company]
        merged = [other for other in merged if not other & company]
        merged.append(company.union(*touching))
    return sorted(tuple(sorted(block)) for block in merged)


def _all_ways(blocks: Sequence[tuple[str, ...]]) -> Iterator[list[list[tuple[str, ...]]]]:
    if not blocks:
        yield []
        return
    first, rest = blocks[0], blocks[1:]
    for way in _all_ways(rest):
        yield [[first], *way]
        for index, pool in enumerate(way):
            yield [*way[:index], [first, *pool], *way[index + 1 :]]


def _usual_ways(blocks: Sequence[tuple[str, ...]], demands: Sequence[Demand]) -> Iterator[list[list[tuple[str, ...]]]]:
    """Yield the partitions that are common in practice.

    These are: all colocated; engines apart; engines, trained and scoring models each apart; engines with the scoring
    models; engines one by one with all others together, or with trained roles one by one; every role on its own GPUs.
    """
    by_role = {demand.role: demand for demand in demands}
    trained = [b for b in blocks if any(by_role[role].trains for role in b)]
    engines = [b for b in blocks if b not in trained and any(by_role[role].generates for role in b)]
    scorers = [b for b in blocks if b not in trained and b not in engines]
    candidates = (
        [list(blocks)],
        [engines, [*trained, *scorers]],
        [engines, trained, scorers],
        [[*engines, *scorers], trained],
        [*([block] for block in engines), [*trained, *scorers]],
        [*([block] for block in engines), *([block] for block in trained), scorers],
        [[block] for block in blocks],
    )
    for way in candidates:
        yield [pool for pool in way if pool]


# Degrees that are tried where they are open.
_DEGREES = [1, 2, 4, 8]
# A cluster is divided into so many parts to get the sizes of pools.
_SHARES = 16
# The parts are larger if the pools could have more combinations of sizes.
_MOST_SIZES = 6000


@dataclass(frozen=True)
class PoolPins:
    """The GPUs that the pinned values of a pool's roles ask for."""

    sizes: frozenset[int] | None
    """The numbers of GPUs to try; None: any."""
    gpus: int | None
    """The number of GPUs, if it is pinned."""
    needs: tuple[tuple[int, int], ...]
    """Groups that the GPUs must contain, each inside one host: the size of each, and how many."""

    @property
    def least(self) -> int:
        """Return the fewest GPUs that are enough."""
        return max(size * number for size, number in self.needs)


def pool_pins(demands: Sequence[Demand]) -> PoolPins:
    """Return what a pool's roles pin. A role that does not pin ``gpus`` may use a part of its pool.

    Raises PlacementError when they pin different numbers of GPUs.
    """
    pinned = {demand.role: gpus for demand in demands if (gpus := demand.pinned("gpus")) is not None}
    if len(set(pinned.values())) > 1:
        less, more = min(pinned, key=lambda role: pinned[role]), max(pinned, key=lambda role: pinned[role])
        raise PlacementError(
            f"roles.{more}.gpus",
            f"{more} and {less} share GPUs, but pin {pinned[more]} and {pinned[less]} of them",
            fix=f"ask for the same number, or give {more} its own with colocate=[]",
        )
    needs = tuple(sorted({_group(demand) for demand in demands}, reverse=True))
    if pinned:
        return PoolPins(frozenset(pinned.values()), next(iter(pinned.values())), needs)
    found = PoolPins(None, None, needs)
    sizes = [_sizes_of(demand) for demand in demands]
    if any(size is None for size in sizes):
        return found
    return replace(found, sizes=frozenset(size for of in sizes for size in of or () if size >= found.least))


def _group(demand: Demand) -> tuple[int, int]:
    """Return the size and number of the groups that a role has at least."""
    size = (demand.pinned("tensor_parallel_size") or 1) * (demand.pinned("sequence_parallel_size") or 1)
    gpus = demand.pinned("gpus")
    if gpus is not None and "data" in demand.parallel:
        return size, gpus // size
    return size, (demand.pinned("data_parallel_size") or 1) * (demand.pinned("pipeline_parallel_size") or 1)


def _sizes_of(demand: Demand) -> frozenset[int] | None:
    """Return the sizes that follow from a pinned data-parallel size; None: any."""
    copies = demand.pinned("data_parallel_size")
    if copies is None:
        return None
    degrees = [
        [pinned] if (pinned := demand.pinned(f"{way}_parallel_size")) else _DEGREES
        for way in ("tensor", "sequence", "pipeline")
    ]
    return frozenset(copies * prod(each) for each in product(*degrees))


class SizeGrid:
    """The sizes of pools that share GPUs: pinned ones, and a grid for open pools, the last of which gets the rest.

    A single open pool is tried with all of its GPUs, a half, a quarter, and so on.
    """

    def __init__(self, pins: Sequence[PoolPins], most: Sequence[int], total: int) -> None:
        self._pins, self._most, self._total = pins, most, total
        # Pools with pinned sizes come first, so that the last open pool gets the rest.
        self._order = sorted(range(len(pins)), key=lambda index: pins[index].sizes is None)
        self._least = [min(of.sizes, default=0) if of.sizes is not None else of.least for of in pins]
        num_open = sum(of.sizes is None for of in pins)
        self._grain = _grain(num_open, total)
        # The fewest GPUs of many pools at once are left to the placement where no other size fits.
        self._tries_least = num_open <= _ALL_PARTITIONS

    def in_order(self, sizes: Sequence[int]) -> list[int | None]:
        """Return the size of each pool; None for those that have none yet."""
        found: list[int | None] = [None] * len(self._pins)
        for index, size in zip(self._order, sizes, strict=False):
            found[index] = size
        return found

    def largest_open(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pools that still lack a size of the grid, with the largest that is left for each."""
        missing = self._order[len(sizes) : -1]
        if len(missing) < 2 or self._pins[missing[0]].sizes is not None:
            return []
        left = self._total - sum(sizes) - sum(self._least[index] for index in self._order[len(sizes) :])
        largest = ((index, min(self._most[index], left + self._least[index])) for index in missing)
        return [(index, size if size == self._most[index] else self._on_grid(index, size)) for index, size in largest]

    def next_smaller(self, index: int, size: int) -> int | None:
        """Return the next smaller size of an open pool on the grid; None if there is none."""
        if size <= self._least[index]:
            return None
        return self._on_grid(index, size - 1)

    def _on_grid(self, index: int, size: int) -> int:
        return max(self._least[index], size // self._grain * self._grain)

    def next_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes that the next pool may have."""
        index, later = self._order[len(sizes)], self._order[len(sizes) + 1 :]
        least, pinned = self._least[index], self._pins[index].sizes
        highest = min(self._most[index], self._total - sum(sizes) - sum(self._least[other] for other in later))
        if pinned is not None:
            found = set(pinned)
        elif len(self._pins) == 1:
            found = {highest >> halvings for halvings in range(highest.bit_length())}
        elif not later:
            found = {highest}
        else:
            found = set(range(-(-least // self._grain) * self._grain, highest + 1, self._grain))
            found |= {least} if self._tries_least or least > 1 else set()
            found |= {highest} if highest == self._most[index] else set()
        return sorted(size for size in found if max(1, least) <= size <= highest)


def _grain(pools: int, total: int) -> int:
    """Return the step between sizes of a pool: sixteenths of the GPUs, or larger parts for many pools."""
    grain = max(1, 2 ** ((total // _SHARES).bit_length() - 1)) if total > _SHARES else (1 if total <= 8 else 2)
    while pools > 2 and total // grain >= 2 * pools and comb(total // grain - 1, pools - 1) > _MOST_SIZES:
        grain *= 2
    return grain
