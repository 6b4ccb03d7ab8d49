"""The exact placement of pools on hosts: how many GPUs of each host each pool gets.

A pool asks for a number of GPUs that contain groups, each inside one host. The goal is lexicographic: as many of the
groups that are of use as possible, for the pools of a given size before the pool that takes what is left; then fewest
(pool, host) pairs; then earlier hosts.

There are two methods. The first places one pool after another, in a few orders, and compares with what each pool would
get if it were alone. No placement is better than one that reaches these bounds, and nearly all do. Anything else is an
integer programme, whose size does not grow with the hosts, since equal hosts are counted, not told apart. It counts for
each pool and kind of host on how many such hosts the pool has g GPUs, and packs these parts into hosts as a cutting
stock problem: a host is a path from 0 to the number of its GPUs, whose steps are parts (Valerio de Carvalho 1999). Two
parts of one pool may meet on a host, which is as if they were one larger part: it contains at least as many groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations, product
from typing import TYPE_CHECKING

from rlflow.resources.cluster import Cluster, Host

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar, LinearExprT

# A safeguard in the solver's own unit of time, which does not depend on the machine and is about a second.
_LIMIT = 20.0
# Up to so many pools are placed in every order.
_ALL_ORDERS = 4

Counts = list[tuple[int, ...]]
"""The GPUs of each pool on each host."""


@dataclass(frozen=True)
class PoolRequest:
    """The GPUs that a pool needs."""

    name: str
    gpus: int | None
    """The number of GPUs; None: any number that contains its groups."""
    size: int = 1
    """GPUs of its largest group that must be inside one host."""
    groups: int | None = None
    """How many groups of that size are of use; None: as many as possible. Fewer do where hosts hold fewer."""
    needs: tuple[tuple[int, int], ...] = ()
    """Groups that its GPUs must contain: the size of each, and how many. Groups of different sizes may overlap."""
    labels: frozenset[str] = frozenset()
    """Use only hosts with all of these labels."""

    def may_use(self, host: Host) -> bool:
        """Return whether the pool may have GPUs of the host."""
        return all(host.has(label) for label in self.labels)


@dataclass(frozen=True)
class _Room:
    """The properties of a host that matter here. Hosts with equal properties are interchangeable."""

    gpus: int
    allowed: tuple[bool, ...]
    """For each pool, whether it may use the host."""


def place_pools(pools: Sequence[PoolRequest], cluster: Cluster) -> Counts | None:
    """Return the GPUs of each pool on each host of the cluster; None if impossible.

    At most one pool may take as many groups as possible. The same pools in another order get the same GPUs. If the
    solver reaches its limit, which is generous, the best solution so far is used.
    """
    assert len({pool.name for pool in pools}) == len(pools), "names tell pools apart"
    order = sorted(range(len(pools)), key=lambda index: (pools[index].groups is None, pools[index].name))
    ordered = [pools[index] for index in order]
    assert all(pool.groups is not None for pool in ordered[:-1]), "one pool at most takes what is left"
    rooms = [_Room(len(host.usable), tuple(pool.may_use(host) for pool in ordered)) for host in cluster.hosts]
    bounds = [_bound(ordered, index, rooms) for index in range(len(ordered))]
    if any(bound is None for bound in bounds) or sum(pool.gpus or 0 for pool in ordered) > sum(r.gpus for r in rooms):
        return None
    counts = _one_by_one(ordered, rooms, [bound for bound in bounds if bound])
    counts = counts or _solve_integer_programme(ordered, rooms)
    places = [order.index(index) for index in range(len(pools))]
    return [tuple(taken[place] for place in places) for taken in counts] if counts is not None else None


def gpu_ids(pools: Sequence[PoolRequest], cluster: Cluster, counts: Counts) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return for each pool its (host, GPU ids) in the order of hosts, with the ids group after group."""
    shares: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in pools]
    largest_first = sorted(range(len(pools)), key=lambda index: (-pools[index].size, pools[index].name))
    for host, taken in zip(cluster.hosts, counts, strict=True):
        free = list(host.usable)
        groups = {
            index: sorted(_take(free, pools[index].size) for _ in range(taken[index] // pools[index].size))
            for index in largest_first
        }
        for index in largest_first:
            groups[index].append(_take(free, taken[index] % pools[index].size))
            if taken[index]:
                shares[index].append((host.name, tuple(gpu for group in groups[index] for gpu in group)))
    return shares


def _take(free: list[int], size: int) -> list[int]:
    """Take a group out of ``free``: neighbours from a multiple of its size, else neighbours, else the first."""
    starts = [gpu for gpu in free if set(range(gpu, gpu + size)) <= set(free)]
    start = min(starts, key=lambda gpu: (gpu % max(1, size) > 0, gpu), default=None)
    group = free[:size] if start is None else list(range(start, start + size))
    for gpu in group:
        free.remove(gpu)
    return group


def _bound(pools: Sequence[PoolRequest], index: int, rooms: Sequence[_Room]) -> tuple[int, int] | None:
    """Return the most groups of use, and the fewest hosts that hold them, if others take no more than they must.

    None where the pool does not even fit alone.
    """
    pool, mine = pools[index], [room.gpus for room in rooms if room.allowed[index]]
    if any(sum(gpus // size for gpus in mine) < number for size, number in pool.needs) or sum(mine) < (pool.gpus or 0):
        return None
    other_gpus = sum(other.gpus or 0 for other in pools) - (pool.gpus or 0)
    left = sum(mine) - max(0, other_gpus - sum(room.gpus for room in rooms if not room.allowed[index]))
    groups = min(sum(gpus // pool.size for gpus in mine), (left if pool.gpus is None else pool.gpus) // pool.size)
    if pool.groups is not None:
        groups = min(groups, pool.groups)
    wanted = [(pool.size, groups), *pool.needs, *([(1, pool.gpus)] if pool.gpus is not None else [])]
    return groups, max(_fewest([gpus // size for gpus in mine], number) for size, number in wanted)


def _fewest(capacities: Sequence[int], wanted: int) -> int:
    """Return the fewest hosts that hold so many; one more than there are if all together do not."""
    return bisect_left(list(accumulate(sorted(capacities, reverse=True), initial=0)), wanted)


def _one_by_one(
    pools: Sequence[PoolRequest], rooms: Sequence[_Room], bounds: Sequence[tuple[int, int]]
) -> Counts | None:
    """Place one pool after another; None unless all get as many groups on as few hosts as each would alone."""
    for order, tight in product(_orders(pools, rooms), (False, True)):
        left = [room.gpus for room in rooms]
        taken = [[0] * len(pools) for _ in rooms]
        for index in order:
            usable = [gpus if room.allowed[index] else 0 for gpus, room in zip(left, rooms, strict=True)]
            mine = _alone(pools[index], usable, tight=tight)
            groups = sum(gpus // pools[index].size for gpus in mine)
            if (groups, sum(gpus > 0 for gpus in mine)) != bounds[index] or not _contains(pools[index], mine):
                break
            for host, gpus in enumerate(mine):
                taken[host][index] = gpus
                left[host] -= gpus
        else:
            return [tuple(counts) for counts in taken]
    return None


def _orders(pools: Sequence[PoolRequest], rooms: Sequence[_Room]) -> Iterator[tuple[int, ...]]:
    """Yield orders of the pools, the most promising first. The pool that takes what is left is always the last."""
    hosts = [sum(room.allowed[index] for room in rooms) for index in range(len(pools))]
    sized = [index for index, pool in enumerate(pools) if pool.groups is not None]
    sized.sort(key=lambda index: (hosts[index], -pools[index].size, -(pools[index].gpus or 0)))
    last = [index for index, pool in enumerate(pools) if pool.groups is None]
    for order in permutations(sized) if len(sized) <= _ALL_ORDERS else [tuple(sized), tuple(sized[::-1])]:
        yield (*order, *last)


def _alone(pool: PoolRequest, room: Sequence[int], *, tight: bool) -> list[int]:
    """Return the GPUs of one pool on each host, of at most ``room``: all groups of use, on few hosts."""
    mine = [0] * len(room)
    missing = sum(gpus // pool.size for gpus in room)
    if pool.gpus is not None:
        missing = min(missing, pool.gpus // pool.size)
    if pool.groups is not None:
        missing = min(missing, pool.groups)
    _fill(mine, room, pool.size, missing, tight=tight)
    if pool.gpus is not None:
        extra = pool.gpus - sum(mine)
        for host in range(len(room)):  # first on hosts that it uses anyway
            if mine[host]:
                more = min(extra, room[host] - mine[host])
                mine[host] += more
                extra -= more
        _fill(mine, room, 1, extra, tight=tight)
    return mine


def _fill(mine: list[int], room: Sequence[int], size: int, missing: int, *, tight: bool) -> None:
    """Add groups on hosts that the pool does not use, those with most room first.

    The last host is the earliest with enough room; ``tight``: the one with the least room of those.
    """
    free = [host for host in range(len(room)) if not mine[host] and room[host] >= size]
    for host in sorted(free, key=lambda host: (-(room[host] // size), room[host])):
        if room[host] // size >= missing:
            break
        mine[host] = room[host] // size * size
        missing -= room[host] // size
    if missing > 0:
        fits = [host for host in free if not mine[host] and room[host] // size >= missing]
        if fits:
            mine[min(fits, key=lambda host: room[host]) if tight else fits[0]] = missing * size


def _contains(pool: PoolRequest, mine: Sequence[int]) -> bool:
    """Return whether GPUs on hosts are as many as the pool asks for, and contain the groups that it needs."""
    enough = all(sum(gpus // size for gpus in mine) >= number for size, number in pool.needs)
    return enough and pool.gpus in (None, sum(mine))


@dataclass(frozen=True)
class _Kind:
    """Equal hosts, and the parts of pools on them."""

    room: _Room
    hosts: int
    parts: dict[tuple[int, int], IntVar]
    """For each pool and number of GPUs, on how many of these hosts the pool has so many."""
    steps: dict[tuple[int, int], IntVar]
    """For each first GPU and number of GPUs, how many of these hosts are cut so."""


def _solve_integer_programme(pools: Sequence[PoolRequest], rooms: Sequence[_Room]) -> Counts | None:
    """Find how many hosts of each kind are cut in which way, and what each pool gets of the parts."""
    from ortools.sat.python import cp_model

    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.linearization_level, solver.parameters.max_deterministic_time = 2, _LIMIT
    kinds = [_kind(model, room, hosts) for room, hosts in Counter(rooms).items()]
    gained: list[IntVar] = []
    for index, pool in enumerate(pools):
        if pool.gpus is not None:
            model.add(_groups(kinds, index, 1) == pool.gpus)
        for size, number in pool.needs:
            model.add(_groups(kinds, index, size) >= number)
        capacity = sum(kind.room.gpus // pool.size * kind.hosts for kind in kinds)
        gained.append(model.new_int_var(0, capacity if pool.groups is None else min(capacity, pool.groups), ""))
        model.add(gained[-1] <= _groups(kinds, index, pool.size))
    sized = [pool.size * got for pool, got in zip(pools, gained, strict=True) if pool.groups is not None]
    goals: list[LinearExprT] = [-sum(sized)] if sized else []
    goals += [-got for pool, got in zip(pools, gained, strict=True) if pool.groups is None]
    goals.append(sum(hosts for kind in kinds for hosts in kind.parts.values()))
    if len(kinds) > 1:
        goals.append(
            sum(place * gpus * hosts for place, kind in enumerate(kinds) for (_, gpus), hosts in kind.parts.items())
        )
    counts: Counts | None = None
    for goal in goals:
        model.minimize(goal)
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        counts = _read(solver, kinds, rooms)
        model.add(goal == solver.value(goal))
    return counts


def _kind(model: CpModel, room: _Room, hosts: int) -> _Kind:
    pools = [index for index, allowed in enumerate(room.allowed) if allowed]
    sizes = range(1, room.gpus + 1)
    parts = {(index, gpus): model.new_int_var(0, hosts, "") for index in pools for gpus in sizes}
    steps = {
        (first, gpus): model.new_int_var(0, hosts, "")
        for first in range(room.gpus)
        for gpus in range(1, room.gpus - first + 1)
    }
    for gpus in sizes:
        cut = sum(number for (_, step), number in steps.items() if step == gpus)
        model.add(sum(parts[index, gpus] for index in pools) == cut)
    for first in range(room.gpus):
        arriving = sum(number for (start, gpus), number in steps.items() if start + gpus == first) if first else hosts
        model.add(sum(number for (start, _), number in steps.items() if start == first) <= arriving)
    return _Kind(room, hosts, parts, steps)


def _groups(kinds: Sequence[_Kind], pool: int, size: int) -> LinearExprT:
    """Return how many groups of a size the pool's GPUs contain."""
    return sum(gpus // size * hosts for kind in kinds for (index, gpus), hosts in kind.parts.items() if index == pool)


def _read(solver: CpSolver, kinds: Sequence[_Kind], rooms: Sequence[_Room]) -> Counts:
    """Return the GPUs of each pool on each host. Of equal hosts, the earlier ones have more of the earlier pools."""
    contents_of: dict[_Room, Counts] = {}
    for kind in kinds:
        steps = Counter({step: solver.value(number) for step, number in kind.steps.items()})
        parts: dict[int, list[int]] = {}
        for (index, gpus), number in kind.parts.items():
            parts.setdefault(gpus, []).extend([index] * solver.value(number))
        contents = []
        for _ in range(kind.hosts):
            taken, first = [0] * len(kind.room.allowed), 0
            while step := next((step for step in steps if step[0] == first and steps[step] > 0), None):
                steps[step] -= 1
                first += step[1]
                taken[parts[step[1]].pop()] += step[1]
            contents.append(tuple(taken))
        contents_of[kind.room] = sorted(contents)
    return [contents_of[room].pop() for room in rooms]
