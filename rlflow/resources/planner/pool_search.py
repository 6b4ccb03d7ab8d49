"""The best use of one pool by its roles."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from rlflow.resources.layout import Layout, Offload
from rlflow.resources.planner.layouts import best_layout
from rlflow.resources.planner.pool import (
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    base_layout,
    host_memory,
    idle_terms,
    sync_memory,
)
from rlflow.resources.workload import Workload

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")


@dataclass(frozen=True)
class PoolUse:
    """The choices of all roles of a pool."""

    choices: Mapping[str, RoleChoice]

    @property
    def unit(self) -> int:
        """Return the size of the largest group that must be inside one host."""
        return max(max(c.layout.tensor_parallel_size, c.layout.sequence_parallel_size) for c in self.choices.values())

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each node."""
        return {node: seconds for choice in self.choices.values() for node, seconds in choice.seconds.items()}


def best_use(pool: Pool, workload: Workload) -> PoolUse | Shortage:
    """Return the fastest way in which all roles of a pool fit together, or the shortage of the nearest one.

    What roles keep on the GPUs while others work is decided for the whole pool, then each role's own layout. Offloading
    is tried only where nothing fits without it.
    """
    shortages: list[Shortage] = []
    known: _Known = {}
    for offload in _OFFLOADS:
        found = []
        for policy in _policies(pool, offload):
            one = _use_by(policy, pool, workload, known)
            if isinstance(one, Shortage):
                shortages.append(one)
            else:
                found.append(one)
        if found:
            return min(found, key=lambda use: sum(use.seconds.values()))
        if not any(demand.trains and "data" in demand.parallel for demand in pool.demands):
            break
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


_Known = dict[tuple[Layout, float, str], RoleChoice | Shortage]


def _use_by(policy: PoolPolicy, pool: Pool, workload: Workload, known: _Known) -> PoolUse | Shortage:
    """Return the best use under one policy. ``known`` has the choices for the same memory under other policies."""
    idle = {demand.role: sum(idle_terms(demand, policy, pool).values()) for demand in pool.demands}
    all_idle = sum(idle.values())
    choices = {}
    for demand in pool.demands:
        available = pool.host_set.usable_gib - (all_idle - idle[demand.role])
        key = (base_layout(demand, policy, pool), available, demand.role)
        if key not in known:
            known[key] = best_layout(demand, workload.of(demand.role), policy, pool, available)
        chosen = known[key]
        if isinstance(chosen, Shortage):
            return chosen
        choices[demand.role] = chosen
    shortage = _host_shortage(pool, choices, workload) or _sync_shortage(pool, choices, workload)
    return PoolUse(choices) if shortage is None else shortage


def _host_shortage(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Shortage | None:
    offloaded = sum(sum(host_memory(d, choices[d.role], workload).values()) for d in pool.demands)
    if offloaded <= pool.host_set.host_gib:
        return None
    what = f"{offloaded:.0f} GiB of host memory for each GPU, of {pool.host_set.host_gib:.0f}"
    return Shortage(pool.demands[0].role, offloaded - pool.host_set.host_gib, what)


def _sync_shortage(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Shortage | None:
    demands = {demand.role: demand for demand in pool.demands}
    for sync in workload.copies:
        if sync.source not in choices or sync.target not in choices:
            continue
        source, target = (demands[sync.source], choices[sync.source]), (demands[sync.target], choices[sync.target])
        needed = sum(sync_memory(*source, *target, pool.host_set.sharp, same_gpus=True).values())
        others = (choice for role, choice in choices.items() if role not in (sync.source, sync.target))
        needed += sum(sum(choice.idle.values()) for choice in others)
        if needed > pool.host_set.usable_gib:
            what = f"{needed:.0f} GiB while its weights go to {sync.target}, of {pool.host_set.usable_gib:.0f} GiB"
            return Shortage(sync.source, needed - pool.host_set.usable_gib, what)
    return None
