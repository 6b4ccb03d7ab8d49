"""Brute force for placement with pinned sizes, which knows nothing of the planner.

It tries every way to share GPUs, every combination of degrees that the pins allow, and every content of every host.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from math import prod

from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Bundle, RolePlacement

_WAYS = ("tensor", "pipeline", "data", "sequence")

Groups = tuple[tuple[int, int], ...]
"""Groups inside hosts that the GPUs of a pool must contain: the size of each, and how many."""


def is_feasible(demands: Sequence[Demand], cluster: Cluster) -> bool:
    """Return whether any assignment of GPUs respects all pins, by trying all of them."""
    by_role = {demand.role: demand for demand in demands}
    hosts = tuple((len(host.usable), frozenset({host.gpu, *host.labels})) for host in cluster.hosts if host.usable)
    return any(
        _fits(hosts, tuple(pools))
        for partition in _partitions(sorted(by_role))
        if all(_may_share([by_role[role] for role in pool], pool) for pool in partition)
        for pools in product(*(_asked([by_role[role] for role in pool]) for pool in partition))
    )


def _partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    if not roles:
        yield []
        return
    first, rest = roles[0], roles[1:]
    for size in range(len(rest) + 1):
        for company in combinations(rest, size):
            for others in _partitions([role for role in rest if role not in company]):
                yield [[first, *company], *others]


def _may_share(demands: Sequence[Demand], roles: Sequence[str]) -> bool:
    for demand in demands:
        company = demand.pins.colocate
        if company == () and len(roles) > 1:
            return False
        if company != "auto" and not set(company) <= set(roles):
            return False
    return len({demand.pins.gpus for demand in demands} - {"auto"}) <= 1


_Pool = tuple[frozenset[str], int | None, Groups]
"""The labels that its hosts must have, its number of GPUs (None: any), and the groups inside."""


def _asked(demands: Sequence[Demand]) -> set[_Pool]:
    """Return what a pool may ask for, one for each combination of its roles' degrees."""
    labels = frozenset(demand.pins.label for demand in demands if demand.pins.label is not None)
    gpus = next((demand.pins.gpus for demand in demands if demand.pins.gpus != "auto"), None)
    found = set()
    for groups in product(*(_degrees(demand) for demand in demands)):
        most: dict[int, int] = {}
        for size, number in groups:
            most[size] = max(number, most.get(size, 0))
        found.add((labels, gpus, tuple(sorted(most.items()))))
    return found


def _degrees(demand: Demand) -> Iterator[tuple[int, int]]:
    """Yield the size of a role's groups and how many it has, for all degrees that the engine and the pins allow.

    A degree of one stands for all, unless the role must use a pinned number of GPUs: more groups, and larger ones,
    contain a single GPU.
    """
    pins = demand.pins
    must_use = pins.gpus if "data" in demand.parallel and pins.gpus != "auto" else None
    for degrees in product(*(_degree(demand, way, must_use) for way in _WAYS)):
        of = dict(zip(_WAYS, degrees, strict=True))
        if _can_share(demand, of) and must_use in (None, prod(degrees)):
            yield of["tensor"] * of["sequence"] * of["pipeline"], of["data"]


def _can_share(demand: Demand, of: Mapping[str, int]) -> bool:
    """Return whether the heads and the layers of a model with as many key-value heads can be shared so."""
    model = demand.architecture
    assert model is not None
    assert model.num_attention_heads == model.num_key_value_heads
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    return not heads % of["tensor"] and not heads % of["sequence"] and of["pipeline"] <= layers


def _degree(demand: Demand, way: str, must_use: int | None) -> Sequence[int]:
    pinned = getattr(demand.pins, f"{way}_parallel_size")
    if pinned != "auto":
        return [pinned] if way in demand.parallel or pinned == 1 else []
    if way not in demand.parallel or must_use is None:
        return [1]
    return [size for size in range(1, must_use + 1) if must_use % size == 0]


@cache
def _fits(hosts: tuple[tuple[int, frozenset[str]], ...], pools: tuple[_Pool, ...]) -> bool:
    """Return whether hosts hold pools, by going through all contents of every host."""
    start = tuple((gpus, tuple(number for _, number in groups)) for _, gpus, groups in pools)
    if sum(gpus or 0 for gpus, _ in start) > sum(gpus for gpus, _ in hosts):
        return False
    missing = {start}
    for usable, labels in hosts:
        contents = _contents(usable, tuple(wanted <= labels for wanted, _, _ in pools))
        missing = {
            tuple(map(_less, before, content, pools))
            for before in missing
            for content in contents
            if all(left is None or gpus <= left for (left, _), gpus in zip(before, content, strict=True))
        }
    return any(all(not gpus and not any(groups) for gpus, groups in left) for left in missing)


def _less(before: tuple[int | None, tuple[int, ...]], gpus: int, pool: _Pool) -> tuple[int | None, tuple[int, ...]]:
    left, groups = before
    sizes = (size for size, _ in pool[2])
    return (
        None if left is None else left - gpus,
        tuple(max(0, number - gpus // size) for number, size in zip(groups, sizes, strict=True)),
    )


@cache
def _contents(usable: int, allowed: tuple[bool, ...]) -> list[tuple[int, ...]]:
    """Return all ways to give pools GPUs of one host."""
    if not allowed:
        return [()]
    return [
        (gpus, *others)
        for gpus in range(usable + 1 if allowed[0] else 1)
        for others in _contents(usable - gpus, allowed[1:])
    ]


def faults(
    demands: Sequence[Demand],
    cluster: Cluster,
    pools: Sequence[Sequence[str]],
    roles: Mapping[str, RolePlacement],
) -> list[str]:
    """Return what is illegal about a plan, in which the roles of each pool share GPUs."""
    found = []
    hosts = {host.name: host for host in cluster.hosts}
    pool_of = {role: index for index, pool in enumerate(pools) for role in pool}
    for demand in demands:
        role, placement, bundles = demand.role, roles[demand.role], roles[demand.role].bundles
        found += [f"{role} {fault}" for fault in _broken_pins(demand, placement)]
        found += [f"{role} {fault}" for bundle in bundles for fault in _wrong_gpu(demand, bundle, hosts[bundle.host])]
        size = placement.layout.tensor_parallel_size * placement.layout.sequence_parallel_size
        if len(set(bundles)) != len(bundles):
            found.append(f"{role} uses a GPU twice")
        if any(len({bundle.host for bundle in bundles[at : at + size]}) > 1 for at in range(0, len(bundles), size)):
            found.append(f"{role} has a group on two hosts")
        for other in set(roles) - {role}:
            together, company = pool_of[role] == pool_of[other], demand.pins.colocate
            if set(bundles) & set(roles[other].bundles) and not together:
                found.append(f"{role} and {other} use the same GPU and are not colocated")
            if company != "auto" and ((other in company and not together) or (company == () and together)):
                found.append(f"{role} {'is' if together else 'is not'} colocated with {other}")
    return found


def _broken_pins(demand: Demand, placement: RolePlacement) -> Iterator[str]:
    layout, pins = placement.layout, demand.pins
    for way in _WAYS:
        degree = getattr(layout, f"{way}_parallel_size")
        if getattr(pins, f"{way}_parallel_size") not in ("auto", degree):
            yield f"{way}_parallel_size is {degree}"
        if degree > 1 and way not in demand.parallel:
            yield f"is {way}-parallel"
    if pins.gpus != "auto" and "data" in demand.parallel and len(placement.bundles) != pins.gpus:
        yield f"uses {len(placement.bundles)} GPUs"
    if pins.gpus != "auto" and len(placement.bundles) > pins.gpus:
        yield f"uses more than {pins.gpus} GPUs"
    degrees = {way: getattr(layout, f"{way}_parallel_size") for way in _WAYS}
    if not _can_share(demand, degrees) or len(placement.bundles) != prod(degrees.values()):
        yield f"cannot have {degrees} with {len(placement.bundles)} GPUs"


def _wrong_gpu(demand: Demand, bundle: Bundle, host: Host) -> Iterator[str]:
    free = range(host.gpus) if host.free is None else host.free
    if host.reserved or bundle.gpu not in free:
        yield f"uses {bundle.host} gpu {bundle.gpu}, which is taken"
    if demand.pins.label not in (None, host.gpu, *host.labels):
        yield f"uses {bundle.host} without the label"
