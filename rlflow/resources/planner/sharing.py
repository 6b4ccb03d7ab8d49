"""Ways for roles to share GPUs: which roles form a pool, and how many GPUs each pool may have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pool import RoleChoice, Shortage
from rlflow.resources.planner.pool_search import PoolUse
from rlflow.resources.planner.simulate import Schedule

Partition = tuple[tuple[str, ...], ...]
"""The pools, each with its roles, sorted."""

# Up to so many blocks of roles, all ways to share are tried; beyond, those that are common in practice.
_ALL_PARTITIONS = 4


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
    labels = {demand.role: demand.pins.label for demand in demands}
    allowed = [way for way in found if all(len({labels[role] for role in pool}) == 1 for pool in way)]
    if not allowed:
        role = next(demand.role for demand in demands if demand.pins.label is not None)
        raise PlacementError(
            f"roles.{role}.label", "differs from that of a role it shares GPUs with", fix="one label for both"
        )
    return sorted(allowed, key=lambda way: (len(way), way))


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
_GROUPS = [1, 2, 4, 8]
# A cluster is divided into so many parts to get the sizes of pools.
_SHARES = 16


def pinned_pool_sizes(demands: Sequence[Demand]) -> frozenset[int] | None:
    """Return the sizes that a pool's roles pin; None: any size. A role with fewer copies uses a part of its pool.

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
    if pinned:
        return frozenset(pinned.values())
    needed = [sizes for demand in demands if (sizes := _sizes_of(demand)) is not None]
    if not needed:
        return None
    least = max(min(sizes) for sizes in needed)
    return frozenset(size for sizes in needed for size in sizes if size >= least)


def _sizes_of(demand: Demand) -> frozenset[int] | None:
    """Return the sizes that follow from a pinned data-parallel size."""
    copies = demand.pinned("data_parallel_size")
    if copies is None or "data" not in demand.parallel:
        return None
    stages = demand.pinned("pipeline_parallel_size") or 1
    tensor, sequence = (
        [pinned] if (pinned := demand.pinned(f"{way}_parallel_size")) else _GROUPS for way in ("tensor", "sequence")
    )
    return frozenset(copies * stages * one * other for one in tensor for other in sequence)


def pool_sizes(wanted: Sequence[frozenset[int] | None], most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield the GPUs of each pool: one of the sizes it pins (None: any), within its hosts and within ``total``.

    Open pools share the remaining GPUs on a grid. A single pool is also tried with a half of its GPUs, a quarter, and
    so on.
    """
    if list(wanted) == [None]:
        yield from ((most[0] >> halvings,) for halvings in range(most[0].bit_length()))
        return
    grain = max(1, 2 ** ((total // _SHARES).bit_length() - 1)) if total > _SHARES else (1 if total <= 8 else 2)
    if len(wanted) > 2 and total > 8:
        grain = max(grain, 2 ** ((total // 8).bit_length() - 1))
    free = [limit for limit, size in zip(most, wanted, strict=True) if size is None]
    for pinned in product(*(sorted(size) for size in wanted if size is not None)):
        left = total - sum(pinned)
        if left < 0 or (free and left < len(free)):
            continue
        for shares in _shares(left, free, grain):
            given, open_ = iter(pinned), iter(shares)
            yield tuple(next(given) if size is not None else next(open_) for size in wanted)


def _shares(left: int, most: Sequence[int], grain: int) -> Iterator[tuple[int, ...]]:
    """Yield for each pool a multiple of the grain, or all that its hosts have; the last pool gets what is left."""
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


@dataclass(frozen=True)
class Candidate:
    """A way to share with pool sizes, with the best use of each pool and the simulated step."""

    partition: Partition
    gpus: tuple[int, ...]
    """The size of each pool."""
    uses: tuple[PoolUse, ...]
    schedule: Schedule

    @property
    def pool_of(self) -> dict[str, int]:
        """Return the index of each role's pool."""
        return {role: index for index, pool in enumerate(self.partition) for role in pool}

    @property
    def choices(self) -> dict[str, RoleChoice]:
        """Return the choice of each role."""
        return {role: choice for use in self.uses for role, choice in use.choices.items()}

    @property
    def margin(self) -> Margin:
        """Return the smallest room that is left for the error of a predicted memory."""
        return max(use.margin for use in self.uses)

    @property
    def used_gpus(self) -> int:
        """Return the number of GPUs that at least one role uses."""
        return sum(max(choice.layout.num_gpus for choice in use.choices.values()) for use in self.uses)


@dataclass(frozen=True)
class RejectedCandidate:
    """A way to share with pool sizes that does not fit."""

    partition: Partition
    gpus: tuple[int, ...]
    shortage: Shortage


def describe_pools(partition: Sequence[Sequence[str]], gpus: Sequence[int]) -> str:
    """Describe pools with their GPUs: ``rollout on 4, actor + reference on 12``."""
    if len(partition) == 1:
        return f"all roles colocated on {gpus[0]}" if len(partition[0]) > 1 else f"{partition[0][0]} on {gpus[0]}"
    return ", ".join(f"{' + '.join(roles)} on {count}" for roles, count in zip(partition, gpus, strict=True))
