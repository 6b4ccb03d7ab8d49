"""Who gets which GPU of which host. Exact about GPUs; the sizes that are left to it follow simple rules.

A pool is a set of roles that use the same GPUs. Its unit is the largest group of GPUs that must lie inside one host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import Demand, Layout, choose_layout, tensor_parallel_size


@dataclass(frozen=True)
class Bundle:
    """The resources of one worker's share: one GPU."""

    host: str
    gpu: int


@dataclass(frozen=True)
class Worker:
    bundles: tuple[Bundle, ...]
    """Tensor-parallel groups one after another, each inside one host."""


@dataclass(frozen=True)
class RolePlacement:
    layout: Layout
    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class _Pool:
    demands: tuple[Demand, ...]
    sizes: tuple[int, ...]
    """The tensor-parallel size of each role."""
    gpus: int | None
    """None: all that the others leave."""

    @property
    def unit(self) -> int:
        """The largest group that uses the pool whole; a larger one takes of the pool what it can."""
        return max(size for size in self.sizes if self.gpus is None or self.gpus % size == 0)


def place(demands: Sequence[Demand], cluster: Cluster) -> Mapping[str, RolePlacement]:
    """Places every role. Raises PlacementError when no placement keeps each tensor-parallel group inside a host."""
    pools = _pools(demands, cluster)
    shares = _divide(pools, cluster)
    placed: dict[str, RolePlacement] = {}
    for pool, share in zip(pools, shares, strict=True):
        for demand, size in zip(pool.demands, pool.sizes, strict=True):
            groups = [group for host, gpus in share for group in _groups(host, gpus, size)]
            placed[demand.role] = _place_role(demand, size, groups, colocated=len(pool.demands) > 1, cluster=cluster)
    return {demand.role: placed[demand.role] for demand in demands}


def _pools(demands: Sequence[Demand], cluster: Cluster) -> list[_Pool]:
    """Roles that name each other share a pool, and so do those that leave it open; a pinned number of GPUs alone
    makes a pool of its own. Where pinned pools take all there is, the open roles join the first that trains.
    Pinned pools come first."""
    by_role = {demand.role: demand for demand in demands}
    sizes = {demand.role: tensor_parallel_size(demand, cluster) for demand in demands}
    open_ended = [d.role for d in demands if d.wants.colocate == "auto" and d.wanted_gpus(sizes[d.role]) is None]
    sets: list[set[str]] = [set(open_ended)] if open_ended else []
    sets += [
        {d.role, *(() if d.wants.colocate == "auto" else d.wants.colocate)} for d in demands if d.role not in open_ended
    ]
    merged: list[set[str]] = []
    for group in sets:
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*touching))
    pools = [_pool([by_role[role] for role in by_role if role in group], sizes) for group in merged]
    pinned = [pool for pool in pools if pool.gpus is not None]
    rest = [pool for pool in pools if pool.gpus is None]
    joinable = [pool for pool in pinned if not any(d.wants.colocate == () for d in pool.demands)]
    guests = [pool for pool in rest if all(d.wants.colocate == "auto" for d in pool.demands)]
    if guests and joinable and sum(pool.gpus or 0 for pool in pinned) == sum(host.gpus for host in cluster.hosts):
        joined = next((pool for pool in joinable if any(d.trains for d in pool.demands)), joinable[0])
        both = _pool([*joined.demands, *(demand for pool in guests for demand in pool.demands)], sizes)
        pinned = [both if pool is joined else pool for pool in pinned]
        rest = [pool for pool in rest if pool not in guests]
    if len(rest) > 1:
        names = " and ".join(f"({', '.join(d.role for d in pool.demands)})" for pool in rest)
        raise PlacementError(
            f"roles.{rest[1].demands[0].role}.gpus",
            f"{names} would each take all GPUs that are left",
            fix="give all but one of them a number of gpus, or let them colocate",
        )
    return pinned + rest


def _pool(demands: Sequence[Demand], sizes: Mapping[str, int]) -> _Pool:
    pinned = {demand.role: demand.wanted_gpus(sizes[demand.role]) for demand in demands}
    counts = {role: count for role, count in pinned.items() if count is not None}
    if len(set(counts.values())) > 1:
        less, more = min(counts, key=lambda role: counts[role]), max(counts, key=lambda role: counts[role])
        raise PlacementError(
            f"roles.{more}.gpus",
            f"{more} and {less} share GPUs, but ask for {counts[more]} and {counts[less]} of them",
            fix=f"ask for the same number, or give {more} its own with colocate=[]",
        )
    return _Pool(tuple(demands), tuple(sizes[demand.role] for demand in demands), next(iter(counts.values()), None))


def _divide(pools: Sequence[_Pool], cluster: Cluster) -> list[list[tuple[str, list[int]]]]:
    """The GPUs of each pool on each host: so that the open pool has as many units as can be, then on fewest hosts."""
    pinned = [pool for pool in pools if pool.gpus is not None]
    open_unit = next((pool.unit for pool in pools if pool.gpus is None), None)
    wanted = tuple((pool.gpus or 0) // pool.unit for pool in pinned)
    units = tuple(pool.unit for pool in pinned)
    found = _best_counts(cluster, wanted, units, open_unit)
    if found is None:
        raise _no_room(pools, cluster)
    shares: list[list[tuple[str, list[int]]]] = [[] for _ in pools]
    for host, taken in zip(cluster.hosts, found, strict=True):
        start = 0
        for index, units_taken in enumerate(taken):
            gpus = units_taken * units[index]
            shares[index].append((host.name, list(range(start, start + gpus))))
            start += gpus
        if open_unit is not None:
            shares[-1].append((host.name, list(range(start, host.gpus))))
    return shares


def _best_counts(
    cluster: Cluster, wanted: tuple[int, ...], units: tuple[int, ...], open_unit: int | None
) -> list[tuple[int, ...]] | None:
    """Units of each pinned pool on each host, by dynamic programming over the hosts.

    None when there is no way, or none that leaves the open pool, where there is one, a single unit.
    """
    free = [host.gpus for host in cluster.hosts]

    @cache
    def best(host: int, missing: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]] | None:
        """(units of the open pool, minus the pools' hosts, this host's counts) from ``host`` on."""
        if host == len(free):
            return (0, 0, ()) if not any(missing) else None
        options = []
        for counts in _fillings(free[host], missing, units):
            after = best(host + 1, tuple(m - c for m, c in zip(missing, counts, strict=True)))
            if after is not None:
                left = free[host] - sum(c * u for c, u in zip(counts, units, strict=True))
                gained = left // open_unit if open_unit else 0
                options.append((after[0] + gained, after[1] - sum(c > 0 for c in counts), counts))
        return max(options, default=None)

    whole = best(0, wanted)
    if whole is None or (open_unit is not None and whole[0] == 0):
        return None
    chosen: list[tuple[int, ...]] = []
    missing = wanted
    for host in range(len(free)):
        found = best(host, missing)
        assert found is not None
        chosen.append(found[2])
        missing = tuple(m - c for m, c in zip(missing, found[2], strict=True))
    return chosen


def _fillings(free: int, missing: Sequence[int], units: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to put units of the pools on a host with ``free`` GPUs."""
    if not missing:
        yield ()
        return
    for count in range(min(missing[0], free // units[0]) + 1):
        for others in _fillings(free - count * units[0], missing[1:], units[1:]):
            yield (count, *others)


def _groups(host: str, gpus: list[int], size: int) -> list[tuple[Bundle, ...]]:
    """The tensor-parallel groups that a host's GPUs make."""
    bundles = [Bundle(host, gpu) for gpu in gpus]
    return [tuple(bundles[start : start + size]) for start in range(0, len(bundles) - size + 1, size)]


def _place_role(
    demand: Demand, size: int, groups: list[tuple[Bundle, ...]], *, colocated: bool, cluster: Cluster
) -> RolePlacement:
    stages, sequence = demand.pipeline_parallel_size, demand.sequence_parallel_size
    count = demand.num_workers
    if count is None:
        count = max(1, len(groups) // (stages * sequence)) * sequence
    if count * stages > len(groups):
        raise PlacementError(
            f"roles.{demand.role}",
            f"{count * stages} groups of {size} GPUs are asked for, the pool has room for {len(groups)}",
            fix="smaller degrees, or more gpus",
        )
    workers = tuple(
        Worker(tuple(bundle for group in groups[first : first + stages] for bundle in group))
        for first in range(0, count * stages, stages)
    )
    return RolePlacement(choose_layout(demand, size, count, colocated=colocated, cluster=cluster), workers)


def _no_room(pools: Sequence[_Pool], cluster: Cluster) -> PlacementError:
    """Names the first pool that does not fit beside those before it."""
    pool = next(pool for count, pool in enumerate(pools, 1) if not _fits(pools[:count], cluster))
    role = pool.demands[pool.sizes.index(pool.unit)].role
    asked = f"{pool.gpus} GPUs" if pool.gpus else "GPUs"
    groups = f" in groups of {pool.unit} inside one host" if pool.unit > 1 else ""
    others = ", ".join(f"{d.role} {p.gpus}" for p in pools if p is not pool and p.gpus for d in p.demands)
    return PlacementError(
        f"roles.{role}",
        f"{asked}{groups} cannot be had from {cluster.shape}",
        free=f"{sum(host.gpus for host in cluster.hosts)} GPUs" + (f", of which asked: {others}" if others else ""),
        fix="ask for fewer gpus, a smaller tensor_parallel_size, or colocate the roles",
    )


def _fits(pools: Sequence[_Pool], cluster: Cluster) -> bool:
    wanted = tuple((pool.gpus or pool.unit) // pool.unit for pool in pools)
    return _best_counts(cluster, wanted, tuple(pool.unit for pool in pools), None) is not None
