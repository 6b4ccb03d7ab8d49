"""A candidate on the hosts of a cluster: which hosts hold its pools, and what their roles do with the GPUs there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlflow.resources.planner.candidate import Candidate, PlacedCandidate
from rlflow.resources.planner.placement_solver import Counts, PoolRequest, place_pools
from rlflow.resources.planner.pools import Partition, PoolUse, Shortage
from rlflow.resources.planner.prediction.partition_times import PartitionTimes
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.planner.search.pool_pins import pool_pins

# The share by which a step is longer on all GPUs, at least, before some of them stay idle.
_SLOWER = 1.01


def place(candidate: Candidate, cache: PoolCache) -> PlacedCandidate | None:
    """Place a candidate, and return the fastest way.

    Smaller groups are tried too where hosts cannot hold its own. GPUs that no group uses go to the last pool, unless
    that is slower with them.
    """
    plans: list[PlacedCandidate] = []
    narrower: Candidate | None = candidate
    while narrower is not None:
        requests = _requests(narrower, cache)
        counts = place_pools(requests, cache.inputs.cluster)
        placed = _settled(narrower.partition, requests, counts, cache) if counts is not None else None
        if placed is not None:
            plans.append(placed)
            if placed.seconds > _SLOWER * narrower.schedule.step_seconds and requests[-1].groups is None:
                plans += _without_rest(narrower, requests, cache)
            if _holds_all_groups(placed):
                break
        narrower = _narrowed(narrower, cache)
    return min(plans, key=lambda placed: (placed.candidate.margin, placed.seconds), default=None)


def place_least(partition: Partition, cache: PoolCache) -> PlacedCandidate | None:
    """Place pools with as few GPUs as they need, and give the last one what is left."""
    requests = []
    for index, roles in enumerate(partition):
        pins = pool_pins(cache.inputs.demands_of(roles), cache.inputs.host_set(roles).largest_host)
        (size, number), takes_rest = pins.needs[0], index == len(partition) - 1 and pins.gpus is None
        groups = None if takes_rest else number if pins.gpus is None else pins.gpus // size
        requests.append(PoolRequest(",".join(roles), pins.gpus, size, groups, pins.needs, cache.inputs.labels(roles)))
    counts = place_pools(requests, cache.inputs.cluster)
    return _settled(partition, tuple(requests), counts, cache) if counts is not None else None


def _requests(candidate: Candidate, cache: PoolCache) -> tuple[PoolRequest, ...]:
    """Return what the pools need. The last pool takes what is left where all GPUs are meant to be used."""
    requests = []
    everything = sum(candidate.gpus) == cache.inputs.num_gpus(candidate.partition)
    for index, (roles, used) in enumerate(zip(candidate.partition, candidate.uses, strict=True)):
        pins = pool_pins(cache.inputs.demands_of(roles), cache.inputs.host_set(roles).largest_host)
        takes_rest = everything and index == len(candidate.partition) - 1 and pins.sizes is None
        gpus = candidate.gpus[index] if pins.sizes else used.num_gpus
        requests.append(
            PoolRequest(
                name=",".join(roles),
                gpus=None if takes_rest else gpus,
                size=used.unit,
                groups=None if takes_rest else gpus // used.unit,
                needs=pins.needs,
                labels=cache.inputs.labels(roles),
            )
        )
    return tuple(requests)


def _without_rest(
    candidate: Candidate, requests: tuple[PoolRequest, ...], cache: PoolCache
) -> Iterator[PlacedCandidate]:
    """Yield a candidate whose last pool has no GPUs beyond its size, if hosts can hold it."""
    gpus, last = candidate.uses[-1].num_gpus, requests[-1]
    exact = (*requests[:-1], replace(last, gpus=gpus, groups=gpus // last.size))
    counts = place_pools(exact, cache.inputs.cluster)
    placed = _settled(candidate.partition, exact, counts, cache) if counts is not None else None
    if placed is not None:
        yield placed


def _holds_all_groups(placed: PlacedCandidate) -> bool:
    return all(
        request.groups is None or sum(taken[index] // request.size for taken in placed.counts) >= request.groups
        for index, request in enumerate(placed.requests)
    )


def _settled(
    partition: Partition, requests: tuple[PoolRequest, ...], counts: Counts, cache: PoolCache
) -> PlacedCandidate | None:
    """Return the candidate with the groups that its hosts really have, which are fewer on uneven hosts."""
    counts = _with_rest(requests, counts, cache)
    sizes = [tuple(taken[index] for taken in counts if taken[index]) for index in range(len(requests))]
    uses: list[PoolUse] = []
    for roles, on_hosts in zip(partition, sizes, strict=True):
        used = cache.on_hosts(roles, on_hosts)
        if isinstance(used, Shortage):
            return None
        uses.append(used)
    settled = PartitionTimes(cache.inputs, partition).candidate(tuple(map(sum, sizes)), uses)
    return PlacedCandidate(settled, requests, counts)


def _with_rest(requests: Sequence[PoolRequest], counts: Counts, cache: PoolCache) -> Counts:
    """Give the last pool, if it takes what is left, also the GPUs that no group of its largest role can use."""
    if requests[-1].groups is not None:
        return counts
    return [
        (*taken[:-1], len(host.usable) - sum(taken[:-1]) if requests[-1].may_use(host) else 0)
        for host, taken in zip(cache.inputs.cluster.hosts, counts, strict=True)
    ]


def _narrowed(candidate: Candidate, cache: PoolCache) -> Candidate | None:
    """Return the candidate with smaller groups in the pool that has the largest ones, if possible."""
    for index in sorted(range(len(candidate.uses)), key=lambda pool: (-candidate.uses[pool].unit, pool)):
        unit = candidate.uses[index].unit
        if unit == 1:
            break
        used = cache.with_groups(candidate.partition[index], candidate.gpus[index], unit - 1)
        if isinstance(used, PoolUse) and used.unit < unit:
            uses = (*candidate.uses[:index], used, *candidate.uses[index + 1 :])
            return PartitionTimes(cache.inputs, candidate.partition).candidate(candidate.gpus, uses)
    return None
