"""The best use of one pool by its roles."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import isinf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload
from rlflow.resources.memory.overheads import Sharp
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.layouts import best_layout
from rlflow.resources.planner.pool import (
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    available_gib,
    base_layout,
    host_memory,
    idle_terms,
    memory_band,
    sync_memory,
)
from rlflow.resources.workload import WeightSync, Workload

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")


@dataclass(frozen=True)
class PoolUse:
    """The choices of all roles of a pool."""

    choices: Mapping[str, RoleChoice]
    margin: Margin
    """The smallest room that is left for the error of a predicted memory."""

    @property
    def unit(self) -> int:
        """Return the size of the largest group that must be inside one host."""
        return max(choice.layout.group_size for choice in self.choices.values())

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that at least one role uses."""
        return max(choice.layout.num_gpus for choice in self.choices.values())

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each node."""
        return {node: seconds for choice in self.choices.values() for node, seconds in choice.seconds.items()}


def best_use(pool: Pool, workload: Workload) -> PoolUse | Shortage:
    """Return the fastest way in which all roles of a pool fit together, or the shortage of the nearest one.

    What roles keep on the GPUs while others work is decided for the whole pool, then each role's own layout. Offloading
    is tried only where nothing fits safely without it.
    """
    shortages: list[Shortage] = []
    found: list[tuple[Margin, int, PoolUse]] = []
    known: _Known = {}
    for index, offload in enumerate(_OFFLOADS):
        for policy in _policies(pool, offload):
            one = _use_by(policy, pool, workload, known)
            if isinstance(one, Shortage):
                shortages.append(one)
            else:
                found.append((one.margin, index, one))
        if any(margin is Margin.SAFE for margin, _, _ in found):
            break
        if not any(demand.trains and "data" in demand.parallel for demand in pool.demands):
            break
    if found:
        return min(found, key=lambda each: (*each[:2], sum(each[2].seconds.values())))[2]
    return min(shortages, key=lambda shortage: shortage.gib)


def _policies(pool: Pool, offload: Offload) -> Iterator[PoolPolicy]:
    spread = any("data" in demand.parallel for demand in pool.demands)
    sleeping = (False, True) if pool.shared and spread else (False,)
    stages = (2, 3) if any(demand.trains for demand in pool.demands) and spread else (3,)
    scorers = any(not demand.trains and not demand.generates for demand in pool.demands)
    sharding = (False, True) if scorers and spread else (True,)
    if offload == "weights":
        stages = (3,)
        # An unsharded model that is not on the GPU would be nowhere.
        sharding = (True,)
    for sleeps, stage, shards in product(sleeping, stages, sharding):
        yield PoolPolicy(sleeps=sleeps, zero_stage=stage, offload=offload, shards_scorers=shards)


_Known = dict[tuple[Layout, float, Margin, str], RoleChoice | Shortage]


def _use_by(policy: PoolPolicy, pool: Pool, workload: Workload, known: _Known) -> PoolUse | Shortage:
    """Return the best use under one policy. ``known`` has the choices for the same memory under other policies."""
    idle = {demand.role: sum(idle_terms(demand, policy, pool).values()) for demand in pool.demands}
    all_idle = sum(idle.values())
    choices = {}
    for demand in pool.demands:
        chosen = _safest(demand, policy, pool, workload, all_idle - idle[demand.role], known)
        if isinstance(chosen, Shortage):
            return chosen
        choices[demand.role] = chosen
    margins = [choice.margin for choice in choices.values()]
    for rest in (_host_margin(pool, choices, workload), _sync_margin(pool, choices, workload)):
        if isinstance(rest, Shortage):
            return rest
        margins.append(rest)
    return PoolUse(choices, max(margins))


def _safest(
    demand: Demand, policy: PoolPolicy, pool: Pool, workload: Workload, beside: float, known: _Known
) -> RoleChoice | Shortage:
    """Return the best choice with the safest margin that any has; ``beside``: GiB of idle roles on its GPUs."""
    layout = base_layout(demand, policy, pool)
    band = memory_band(demand, layout)
    shortage: Shortage | None = None
    for margin in Margin:
        key = (layout, beside, margin, demand.role)
        if key not in known:
            available = available_gib(demand, pool, beside, band.factor(margin))
            known[key] = best_layout(demand, workload.of(demand.role), policy, pool, available)
        chosen = known[key]
        if isinstance(chosen, RoleChoice):
            return replace(chosen, margin=margin)
        if margin is Margin.EXPECTED or shortage is None:
            shortage = chosen
        if isinf(chosen.gib):
            break
    assert shortage is not None
    return shortage


def _host_margin(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Margin | Shortage:
    """Return the margin of host memory: what hosts state is a limit, what they are assumed to have is not."""
    offloaded = sum(sum(host_memory(d, choices[d.role], workload).values()) for d in pool.demands)
    if offloaded > pool.host_set.host_gib:
        what = f"{offloaded:.0f} GiB of host memory for each GPU, of {pool.host_set.host_gib:.0f}"
        return Shortage(pool.demands[0].role, offloaded - pool.host_set.host_gib, what)
    return Margin.SAFE if offloaded <= pool.host_set.assumed_host_gib else Margin.EXPECTED


def _sync_margin(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Margin | Shortage:
    """Return the margin of the weight sync that needs most."""
    usable = pool.host_set.usable_gib
    demands = {demand.role: demand for demand in pool.demands}
    worst = Margin.SAFE
    for sync, needed in sync_needs(demands, choices, workload, pool.host_set.sharp):
        band = memory_band(demands[sync.source], choices[sync.source].layout)
        margin = next((margin for margin in Margin if needed * band.factor(margin) <= usable), None)
        if margin is None:
            what = f"{needed:.0f} GiB while its weights go to {sync.target}, of {usable:.0f} GiB"
            return Shortage(sync.source, needed - usable, what)
        worst = max(worst, margin)
    return worst


def sync_needs(
    demands: Mapping[str, Demand], choices: Mapping[str, RoleChoice], workload: Workload, sharp: Sharp
) -> Iterator[tuple[WeightSync, float]]:
    """Yield each weight sync between roles of a pool with the memory that it needs, idle roles included."""
    for sync in workload.copies:
        if sync.source not in choices or sync.target not in choices:
            continue
        source, target = (demands[sync.source], choices[sync.source]), (demands[sync.target], choices[sync.target])
        needed = sum(sync_memory(*source, *target, sharp, same_gpus=True).values())
        others = (choice for role, choice in choices.items() if role not in (sync.source, sync.target))
        yield sync, needed + sum(sum(choice.idle.values()) for choice in others)
