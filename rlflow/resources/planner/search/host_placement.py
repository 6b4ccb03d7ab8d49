"""A candidate on the hosts of a cluster: which hosts hold its pools, and what their roles do with the GPUs there."""

from collections.abc import Sequence

from rlflow.resources.planner.candidate import Candidate, PlacedCandidate, simulated
from rlflow.resources.planner.placement_solver import Counts, PoolRequest, place_pools
from rlflow.resources.planner.pool import Shortage
from rlflow.resources.planner.search.pool_search import PoolUse
from rlflow.resources.planner.search.pool_uses import PoolUses
from rlflow.resources.planner.search.sharing import Partition


def place(candidate: Candidate, of: PoolUses) -> PlacedCandidate | None:
    """Place a candidate; where hosts cannot hold its groups, also with smaller ones, and return the fastest."""
    found: list[PlacedCandidate] = []
    narrower: Candidate | None = candidate
    while narrower is not None:
        requests = _requests(narrower, of)
        counts = place_pools(requests, of.cluster)
        placed = _settled(narrower.partition, requests, counts, of) if counts is not None else None
        if placed is not None:
            found.append(placed)
            if _holds_all_groups(placed):
                break
        narrower = _narrowed(narrower, of)
    return min(found, key=lambda placed: (placed.candidate.margin, placed.seconds), default=None)


def place_least(partition: Partition, of: PoolUses) -> PlacedCandidate | None:
    """Place pools with as few GPUs as they need, and give the last one what is left."""
    requests = []
    for index, roles in enumerate(partition):
        pins = of.pins(roles)
        (size, number), takes_rest = pins.needs[0], index == len(partition) - 1 and pins.gpus is None
        groups = None if takes_rest else number if pins.gpus is None else pins.gpus // size
        requests.append(PoolRequest(",".join(roles), pins.gpus, size, groups, pins.needs, of.labels(roles)))
    counts = place_pools(requests, of.cluster)
    return _settled(partition, tuple(requests), counts, of) if counts is not None else None


def _requests(candidate: Candidate, of: PoolUses) -> tuple[PoolRequest, ...]:
    """Return what the pools need. The last pool takes what is left where all GPUs are meant to be used."""
    requests = []
    everything = sum(candidate.gpus) == of.total(candidate.partition)
    for index, (roles, used) in enumerate(zip(candidate.partition, candidate.uses, strict=True)):
        pins = of.pins(roles)
        takes_rest = everything and index == len(candidate.partition) - 1 and pins.sizes is None
        gpus = candidate.gpus[index] if pins.sizes else used.num_gpus
        requests.append(
            PoolRequest(
                name=",".join(roles),
                gpus=None if takes_rest else gpus,
                size=used.unit,
                groups=None if takes_rest else gpus // used.unit,
                needs=pins.needs,
                labels=of.labels(roles),
            )
        )
    return tuple(requests)


def _holds_all_groups(placed: PlacedCandidate) -> bool:
    return all(
        request.groups is None or sum(taken[index] // request.size for taken in placed.counts) >= request.groups
        for index, request in enumerate(placed.requests)
    )


def _settled(
    partition: Partition, requests: tuple[PoolRequest, ...], counts: Counts, of: PoolUses
) -> PlacedCandidate | None:
    """Return the candidate with the groups that its hosts really have, which are fewer on uneven hosts."""
    counts = _with_rest(requests, counts, of)
    sizes = [tuple(taken[index] for taken in counts if taken[index]) for index in range(len(requests))]
    uses: list[PoolUse] = []
    for roles, on_hosts in zip(partition, sizes, strict=True):
        used = of.on_hosts(roles, on_hosts)
        if isinstance(used, Shortage):
            return None
        uses.append(used)
    settled = simulated(partition, tuple(map(sum, sizes)), uses, of)
    return PlacedCandidate(settled, requests, counts)


def _with_rest(requests: Sequence[PoolRequest], counts: Counts, of: PoolUses) -> Counts:
    """Give the last pool, if it takes what is left, also the GPUs that no group of its largest role can use."""
    if requests[-1].groups is not None:
        return counts
    return [
        (*taken[:-1], len(host.usable) - sum(taken[:-1]) if requests[-1].may_use(host) else 0)
        for host, taken in zip(of.cluster.hosts, counts, strict=True)
    ]


def _narrowed(candidate: Candidate, of: PoolUses) -> Candidate | None:
    """Return the candidate with smaller groups in the pool that has the largest ones, if possible."""
    for index in sorted(range(len(candidate.uses)), key=lambda each: (-candidate.uses[each].unit, each)):
        unit = candidate.uses[index].unit
        if unit == 1:
            break
        used = of.ideal(candidate.partition[index], candidate.gpus[index], largest_group=unit - 1)
        if isinstance(used, PoolUse) and used.unit < unit:
            uses = (*candidate.uses[:index], used, *candidate.uses[index + 1 :])
            return simulated(candidate.partition, candidate.gpus, uses, of)
    return None
