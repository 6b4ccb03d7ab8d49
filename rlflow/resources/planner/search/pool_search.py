"""The best use of one pool by its roles."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, isinf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload
from rlflow.resources.memory.overheads import Sharp
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pool import (
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    available_gib,
    base_layout,
    host_memory,
    memory_band,
    sync_memory,
)
from rlflow.resources.planner.search.layout_search import LayoutSearch
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

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each node."""
        return {node: seconds for choice in self.choices.values() for node, seconds in choice.seconds.items()}

    @cached_property
    def total(self) -> float:
        """Return the seconds of all nodes together."""
        return sum(self.seconds.values())


class RoleSearches:
    """The layout searches of the roles of pools that have the same GPUs, each made once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._by_policy: dict[tuple[str, bool, PoolPolicy | None], LayoutSearch] = {}
        self._by_layout: dict[tuple[str, bool, Layout], LayoutSearch] = {}

    def of(self, demand: Demand, policy: PoolPolicy, pool: Pool) -> LayoutSearch:
        """Return the search of a role under a policy."""
        # An engine has no state that a policy could move.
        key = (demand.role, pool.shared, None if demand.generates and not demand.trains else policy)
        if key not in self._by_policy:
            own = (demand.role, pool.shared, base_layout(demand, policy, pool))
            if own not in self._by_layout:
                self._by_layout[own] = LayoutSearch(demand, self._workload.of(demand.role), policy, pool)
            self._by_policy[key] = self._by_layout[own]
        return self._by_policy[key]


def best_use(pool: Pool, workload: Workload, searches: RoleSearches) -> PoolUse | Shortage:
    """Return the fastest way in which all roles of a pool fit together, or the shortage of the nearest one.

    What roles keep on the GPUs while others work is decided for the whole pool, then each role's own layout. Offloading
    is tried only where nothing fits safely without it. A policy is given up once it cannot be the best one.
    """
    shortages: list[Shortage] = []
    best: PoolUse | None = None
    for offload in _OFFLOADS:
        without = best
        for policy in _policies(pool, offload):
            limit, below = Margin.POSSIBLE, inf
            if best is not None:
                limit = best.margin if best is not without else Margin(best.margin - 1)
                below = best.total if best.margin is Margin.SAFE else inf
            one = _use_by(policy, pool, workload, searches, limit, below)
            if isinstance(one, Shortage):
                shortages.append(one)
            elif one.margin <= limit and (best is None or (one.margin, one.total) < (best.margin, best.total)):
                best = one
        if best is not None and best.margin is Margin.SAFE:
            break
        if not any(_shards_state(demand) for demand in pool.demands):
            break
    return best or min(shortages, key=lambda shortage: shortage.gib)


def least_use(demand: Demand, pool: Pool, searches: RoleSearches) -> tuple[Margin, Mapping[str, float]]:
    """Return the safest margin and the least time of each node of a role, if idle roles beside it held nothing."""
    found = _without_sleep(demand, pool, searches, "none")
    at_best = {node: min(search.seconds[node] for search in found) for node in found[0].seconds}
    band = memory_band(demand, base_layout(demand, PoolPolicy(), pool))
    for margin in Margin:
        available = available_gib(demand, pool, 0.0, band.factor(margin))
        least: Mapping[str, float] = dict.fromkeys(at_best, inf)
        for search in found:
            least = search.least_seconds(available, least)
        if least != at_best and any(_shards_state(other) for other in pool.demands):
            for search in (each for way in _OFFLOADS[1:] for each in _without_sleep(demand, pool, searches, way)):
                least = search.least_seconds(available, least)
        if all(seconds < inf for seconds in least.values()):
            return margin, least
    return Margin.POSSIBLE, at_best


def _without_sleep(demand: Demand, pool: Pool, searches: RoleSearches, offload: Offload) -> list[LayoutSearch]:
    """Return the searches of a role whose state stays where it is; sleeping saves memory for other roles only."""
    policies = (policy for policy in _policies(pool, offload) if not policy.sleeps)
    return list(dict.fromkeys(searches.of(demand, policy, pool) for policy in policies))


def _shards_state(demand: Demand) -> bool:
    """Return whether a role has state of training that it may offload."""
    return demand.trains and "data" in demand.parallel


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


def _use_by(
    policy: PoolPolicy, pool: Pool, workload: Workload, searches: RoleSearches, limit: Margin, below: float
) -> PoolUse | Shortage:
    """Return the best use under one policy with a margin up to ``limit``, in less than ``below`` seconds."""
    known = {demand.role: searches.of(demand, policy, pool) for demand in pool.demands}
    all_idle = sum(search.idle_gib for search in known.values())
    seconds = {node: least for search in known.values() for node, least in search.seconds.items()}
    choices = {}
    for demand in pool.demands:
        if sum(seconds.values()) >= below:
            return Shortage(demand.role, inf, "another policy is as fast")
        search = known[demand.role]
        chosen = _safest(demand, policy, pool, search, all_idle - search.idle_gib, limit)
        if isinstance(chosen, Shortage):
            return chosen
        choices[demand.role] = chosen
        seconds |= chosen.seconds
    margins = [choice.margin for choice in choices.values()]
    for rest in (_host_margin(pool, choices, workload), _sync_margin(pool, choices, workload)):
        if isinstance(rest, Shortage):
            return rest
        margins.append(rest)
    return PoolUse(choices, max(margins))


def _safest(
    demand: Demand, policy: PoolPolicy, pool: Pool, search: LayoutSearch, beside: float, limit: Margin
) -> RoleChoice | Shortage:
    """Return the best choice with the safest margin that any has; ``beside``: GiB of idle roles on its GPUs."""
    band = memory_band(demand, base_layout(demand, policy, pool))
    shortage: Shortage | None = None
    for margin in Margin:
        if margin > limit:
            break
        chosen = search.best(available_gib(demand, pool, beside, band.factor(margin)))
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
