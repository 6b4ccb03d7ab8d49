"""The exact placement of pools on hosts, in whole units.

A pool's unit is a group of GPUs inside one host. The goal is lexicographic: most units for the pool that takes what is
left, then fewest (pool, host) pairs, then earlier hosts.

There are three methods, from the cheapest. One pool is counted. A few pools on a few hosts are a dynamic programme over
the hosts. Anything larger is an integer programme, whose size does not grow with the hosts, since equal hosts are
counted, not told apart. It rests on this argument: call what one host gives to pools of one unit a slot. Where two
pools meet in two slots, a unit of one pool can be exchanged for a unit of the other until one pair is gone, and longer
cycles can be resolved in the same way. In the best answer pools and slots form a forest, so of n pools with the same
unit at most n - 1 slots are shared. All other slots have one pool each, and only their number of each size matters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod
from typing import TYPE_CHECKING

from rlflow.resources.cluster import Cluster

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar, LinearExprT

# The most options for the dynamic programme, which then takes less time than importing the solver.
_FEW = 50_000
# A safeguard in the solver's own unit of time, which does not depend on the machine and is about a second.
_LIMIT = 20.0

Counts = list[tuple[int, ...]]
"""The units of each pool on each host."""


@dataclass(frozen=True)
class PoolRequest:
    """The GPUs that a pool needs."""

    name: str
    unit: int
    """GPUs of the largest group that must be inside one host."""
    units: int | None
    """The number of units; None: as many as possible, and at least one."""
    label: str | None = None
    """Use only hosts with this label."""


@dataclass(frozen=True)
class _Room:
    """The properties of a host that matter here. Hosts with equal properties are interchangeable."""

    gpus: int
    allowed: tuple[bool, ...]
    """For each pool, whether it may use the host."""

    def units(self, pools: Sequence[PoolRequest], index: int) -> int:
        """Return how many of the pool's units the empty host holds."""
        return self.gpus // pools[index].unit if self.allowed[index] else 0


def place_pools(pools: Sequence[PoolRequest], cluster: Cluster) -> list[list[tuple[str, tuple[int, ...]]]] | None:
    """Return for each pool its (host, GPU ids) in the order of hosts, with the ids unit after unit; None if impossible.

    At most one pool may leave its units open. The same pools in another order get the same GPUs. If the solver reaches
    its limit, which is generous, the best solution so far is used.
    """
    ordered = sorted(pools, key=lambda pool: (pool.units is None, pool.name))
    assert len({pool.name for pool in pools}) == len(pools), "names tell pools apart"
    assert all(pool.units is not None for pool in ordered[:-1]), "one pool at most is open"
    rooms = [_Room(len(host.usable), tuple(host.has(pool.label) for pool in ordered)) for host in cluster.hosts]
    counts = _count(ordered, rooms)
    if counts is None:
        return None
    shares: dict[str, list[tuple[str, tuple[int, ...]]]] = {pool.name: [] for pool in pools}
    for host, taken in zip(cluster.hosts, counts, strict=True):
        free = list(host.usable)
        for pool, units in sorted(zip(ordered, taken, strict=True), key=lambda each: (-each[0].unit, each[0].name)):
            if units:
                groups = sorted(_take(free, pool.unit) for _ in range(units))
                shares[pool.name].append((host.name, tuple(gpu for group in groups for gpu in group)))
    return [shares[pool.name] for pool in pools]


def _take(free: list[int], unit: int) -> list[int]:
    """Take a group out of ``free``: neighbours from a multiple of the unit, else neighbours, else the first."""
    starts = [gpu for gpu in free if set(range(gpu, gpu + unit)) <= set(free)]
    start = min(starts, key=lambda gpu: (gpu % unit > 0, gpu), default=None)
    group = free[:unit] if start is None else list(range(start, start + unit))
    for gpu in group:
        free.remove(gpu)
    return group


def _count(pools: Sequence[PoolRequest], rooms: Sequence[_Room]) -> Counts | None:
    if len(pools) == 1:
        return _one_pool([room.units(pools, 0) for room in rooms], pools[0].units)
    states = prod((pool.units or 0) + 1 for pool in pools)
    options = sum(prod(room.units(pools, i) + 1 for i, pool in enumerate(pools) if pool.units) for room in rooms)
    return _host_by_host(pools, rooms) if states * options <= _FEW else _solve_integer_programme(pools, rooms)


def _one_pool(most: Sequence[int], wanted: int | None) -> Counts | None:
    """Place one pool. ``most`` has the units that each host holds."""
    missing = sum(most) if wanted is None else wanted
    if missing > sum(most) or (wanted is None and missing == 0):
        return None
    counts: Counts = []
    for index, units in enumerate(most):
        taken, later = min(units, missing), most[index + 1 :]
        if _fewest(later, missing - taken) + 1 > _fewest(later, missing):
            taken = 0
        counts.append((taken,))
        missing -= taken
    return counts


def _fewest(most: Sequence[int], wanted: int) -> int:
    """Return the fewest hosts that hold so many units; one more than there are if all together do not."""
    return bisect_left(list(accumulate(sorted(most, reverse=True), initial=0)), wanted)


def _host_by_host(pools: Sequence[PoolRequest], rooms: Sequence[_Room]) -> Counts | None:
    """Solve from the last host to the first: for whatever is still missing, find the best way from there on."""
    rest = pools[-1] if pools and pools[-1].units is None else None
    wanted = tuple(pool.units for pool in pools if pool.units is not None)
    # (units of the open pool, minus the pairs, this host's units)
    best: list[dict[tuple[int, ...], tuple[int, int, tuple[int, ...]]]] = [{(0,) * len(wanted): (0, 0, ())}]
    for room in reversed(rooms):
        after, here = best[-1], {}
        for missing in product(*(range(units + 1) for units in wanted)):
            options = []
            for counts, left in _fillings(pools, room, missing):
                then = after.get(tuple(m - c for m, c in zip(missing, counts, strict=False)))
                if then is not None:
                    gained = left // rest.unit if rest and room.allowed[-1] else 0
                    taken = (*counts, gained) if rest else counts
                    options.append((then[0] + gained, then[1] - sum(units > 0 for units in taken), taken))
            if options:
                here[missing] = max(options)
        best.append(here)
    found = best[-1].get(wanted)
    if found is None or (rest and found[0] == 0):
        return None
    result: Counts = []
    for table in reversed(best[1:]):
        result.append(table[wanted][2])
        wanted = tuple(m - c for m, c in zip(wanted, result[-1], strict=False))
    return result


def _fillings(
    pools: Sequence[PoolRequest], room: _Room, missing: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield every (units of each pinned pool on this host, GPUs left over)."""
    most = [min(units, room.units(pools, index)) for index, units in enumerate(missing)]
    for counts in product(*(range(units + 1) for units in most)):
        left = room.gpus - sum(units * pool.unit for units, pool in zip(counts, pools, strict=False))
        if left >= 0:
            yield counts, left


_Alike = tuple[_Room, int]  # and how many there are
_Slot = tuple[int, int]  # the kind of host, that is its place among the alike, and how many units it gives


@dataclass(frozen=True)
class _Family:
    """The pools with one unit. Its lists of variables are meant to be summed."""

    unit: int
    alone: dict[int, dict[_Slot, IntVar]]
    """For each pool, the number of slots that it has to itself."""
    shared: list[tuple[dict[_Slot, IntVar], dict[int, IntVar]]]
    """For each shared slot: which slot it is, and the units of each pool in it."""
    pairs: dict[int, list[IntVar]]
    """The hosts of each pool."""

    def units(self, index: int) -> LinearExprT:
        alone = sum(n * number for (_, n), number in self.alone[index].items())
        return alone + sum(parts[index] for _, parts in self.shared)

    def filled(self, slot: _Slot) -> LinearExprT:
        return sum(
            slots[slot] for slots in (*self.alone.values(), *(which for which, _ in self.shared)) if slot in slots
        )


def _family(model: CpModel, unit: int, pools: Sequence[PoolRequest], alike: Sequence[_Alike]) -> _Family:
    slots = [(kind, n) for kind, (room, _) in enumerate(alike) for n in range(1, room.gpus // unit + 1)]
    alone = {
        index: {slot: model.new_int_var(0, alike[slot[0]][1], "") for slot in slots if alike[slot[0]][0].allowed[index]}
        for index, pool in enumerate(pools)
        if pool.unit == unit
    }
    family = _Family(unit, alone, [], {index: list(numbers.values()) for index, numbers in alone.items()})
    largest = max((n for _, n in slots), default=0)
    sizes = []
    for _ in range(len(alone) - 1 if largest > 1 else 0):
        which = {slot: model.new_bool_var("") for slot in slots if slot[1] > 1}
        parts = {index: model.new_int_var(0, largest - 1, "") for index in alone}
        insides = {index: model.new_bool_var("") for index in alone}
        model.add(sum(insides.values()) >= 2 * sum(which.values()))
        for index, inside in insides.items():
            family.pairs[index].append(inside)
            model.add(parts[index] >= inside)
            model.add(parts[index] <= (largest - 1) * inside)
            for slot, chosen in which.items():
                if slot not in alone[index]:
                    model.add_implication(chosen, ~inside)
        sizes.append(sum(n * chosen for (_, n), chosen in which.items()))
        model.add_at_most_one(which.values())
        model.add(sum(parts.values()) == sizes[-1])
        family.shared.append((which, parts))
    for larger, smaller in pairwise(sizes):  # nothing else tells them apart
        model.add(larger >= smaller)
    return family


def _solve_integer_programme(pools: Sequence[PoolRequest], rooms: Sequence[_Room]) -> Counts | None:
    """Find how many hosts of each kind are cut in which way, and what fills the slots."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    alike = list(Counter(rooms).items())
    families = [_family(model, unit, pools, alike) for unit in sorted({pool.unit for pool in pools}, reverse=True)]
    # Of each kind, the hosts that are cut into so many units of each family.
    units = [family.unit for family in families]
    cuts = [{cut: model.new_int_var(0, number, "") for cut in _cuts(room.gpus, units)} for room, number in alike]
    late: list[LinearExprT] = []
    for kind, (room, number) in enumerate(alike):
        model.add(sum(cuts[kind].values()) == number)
        for place, family in enumerate(families):
            for n in range(1, room.gpus // family.unit + 1):
                filled = family.filled((kind, n))
                model.add(filled == sum(hosts for cut, hosts in cuts[kind].items() if cut[place] == n))
                late += [kind * n * family.unit * filled] if kind else []
    goals: list[LinearExprT] = [sum(pair for family in families for pairs in family.pairs.values() for pair in pairs)]
    for index, pool in enumerate(pools):
        family = families[units.index(pool.unit)]
        got = family.units(index)
        goals = [-got, *goals] if pool.units is None else goals
        model.add(got >= 1 if pool.units is None else got == pool.units)
        # It follows from the rest, and is what bounds the search.
        fewest = _fewest([room.units(pools, index) for room in rooms], 1 if pool.units is None else pool.units)
        model.add(sum(family.pairs[index]) >= fewest)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = _LIMIT
    counts: Counts | None = None
    for goal in [*goals, *([sum(late)] if late else [])]:
        model.minimize(goal)
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            break
        counts = _read(solver, families, cuts, rooms)
        model.add(goal == solver.value(goal))
    return counts


def _cuts(gpus: int, units: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut GPUs into units; some GPUs may be left over."""
    if not units:
        yield ()
        return
    for n in range(gpus // units[0] + 1):
        for others in _cuts(gpus - n * units[0], units[1:]):
            yield (n, *others)


def _read(
    solver: CpSolver, families: Sequence[_Family], cuts: Sequence[dict[tuple[int, ...], IntVar]], rooms: Sequence[_Room]
) -> Counts:
    """Return the units of each pool on each host.

    Among equal hosts, the earlier ones have more of the earlier pools.
    """
    filled: dict[tuple[int, _Slot], list[dict[int, int]]] = defaultdict(list)
    for place, family in enumerate(families):
        for index, numbers in family.alone.items():
            for slot, number in numbers.items():
                filled[place, slot] += [{index: slot[1]}] * solver.value(number)
        for which, parts in family.shared:
            for slot, chosen in which.items():
                if solver.value(chosen):
                    filled[place, slot].append({index: solver.value(units) for index, units in parts.items()})
    hosts: dict[_Room, Counts] = {}
    for kind, room in enumerate(dict.fromkeys(rooms)):
        contents = []
        for cut in (cut for cut, number in cuts[kind].items() for _ in range(solver.value(number))):
            slots = [filled[place, (kind, n)].pop() for place, n in enumerate(cut) if n]
            units = {index: n for slot in slots for index, n in slot.items()}
            contents.append(tuple(units.get(index, 0) for index in range(len(room.allowed))))
        hosts[room] = sorted(contents)
    return [hosts[room].pop() for room in rooms]
