"""The best use of one pool by its roles."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import inf, isinf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Pool, PoolUse, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import available_gib, host_memory, memory_band, sync_needs
from rlflow.resources.planner.prediction.task_times import with_turn
from rlflow.resources.planner.search.degrees import PoolPolicy, base_layout
from rlflow.resources.planner.search.layout_search import LayoutSearch
from rlflow.resources.planner.search.staying import with_fewer_turns
from rlflow.resources.workload import Workload

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")


class LayoutSearches:
    """The layout searches of the roles of pools that have the same GPUs, each made once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._by_policy: dict[tuple[str, bool, PoolPolicy], LayoutSearch] = {}
        self._by_base: dict[tuple[str, bool, Layout], LayoutSearch] = {}

    def of(self, demand: Demand, policy: PoolPolicy, pool: Pool) -> LayoutSearch:
        """Return the search of a role under a policy; policies that do not differ for the role share it."""
        role = (demand.role, pool.is_shared)
        if (*role, policy) not in self._by_policy:
            base = base_layout(demand, policy, pool)
            if (*role, base) not in self._by_base:
                self._by_base[*role, base] = LayoutSearch(demand, self._workload.of(demand.role), base, pool)
            self._by_policy[*role, policy] = self._by_base[*role, base]
        return self._by_policy[*role, policy]


def least_seconds(pool: Pool, searches: LayoutSearches) -> Mapping[str, float]:
    """Return times that no node is faster than in any use of a pool: those with nothing offloaded or asleep."""
    seconds: dict[str, float] = {}
    for policy in _policies(pool, "none"):
        if not policy.sleeps:
            for demand in pool.demands:
                for node, least in searches.of(demand, policy, pool).least_node_seconds.items():
                    seconds[node] = min(least, seconds.get(node, inf))
    return seconds


def best_use(pool: Pool, workload: Workload, searches: LayoutSearches) -> PoolUse | Shortage:
    """Return the fastest way in which all roles of a pool fit together, or the shortage of the nearest one.

    What roles keep on the GPUs while others work is decided for the whole pool, then each role's own layout. Offloading
    is tried only where nothing fits safely without it, and taken only where the plan is safer with it.
    """
    shortages: list[Shortage] = []
    best: PoolUse | None = None
    for offload in _OFFLOADS:
        without = best
        for policy in _policies(pool, offload):
            below = best.total if best is not None and best.margin is Margin.SAFE else inf
            use = _use_under(policy, pool, workload, searches, below)
            if isinstance(use, Shortage):
                shortages.append(use)
                continue
            use = with_fewer_turns(pool, use, workload, _sync_margin)
            if (without is None or use.margin < without.margin) and (
                best is None or (use.margin, use.total) < (best.margin, best.total)
            ):
                best = use
        if best is not None and best.margin is Margin.SAFE:
            break
        if not any(demand.job == "train" and "data" in demand.parallel for demand in pool.demands):
            break
    return best or min(shortages, key=lambda shortage: shortage.gib)


def _policies(pool: Pool, offload: Offload) -> Iterator[PoolPolicy]:
    spread = any("data" in demand.parallel for demand in pool.demands)
    jobs = {demand.job for demand in pool.demands}
    sleeping = (False, True) if pool.is_shared and spread else (False,)
    stages = (2, 3) if "train" in jobs and spread else (3,)
    sharding = (False, True) if "score" in jobs and spread else (True,)
    if offload == "weights":
        stages = (3,)
        # An unsharded model that is not on the GPU would be nowhere.
        sharding = (True,)
    for sleeps, stage, shards in product(sleeping, stages, sharding):
        yield PoolPolicy(sleeps=sleeps, zero_stage=stage, offload=offload, shards_scorers=shards)


def _use_under(
    policy: PoolPolicy, pool: Pool, workload: Workload, searches: LayoutSearches, below: float
) -> PoolUse | Shortage:
    """Return the best use of a pool under one policy, if it can take less than ``below`` seconds."""
    layouts = {demand.role: searches.of(demand, policy, pool) for demand in pool.demands}
    idle_gib = sum(search.idle_gib for search in layouts.values())
    least_seconds = sum(search.least_seconds for search in layouts.values())
    choices = {}
    for demand in pool.demands:
        if least_seconds >= below:
            return Shortage(demand.role, inf, "another policy is as fast")
        search = layouts[demand.role]
        choice = _safest(demand, pool, search, idle_gib - search.idle_gib)
        if isinstance(choice, Shortage):
            return choice
        choices[demand.role] = choice = with_turn(choice, demand, pool)
        least_seconds += sum(choice.seconds.values()) - search.least_seconds
    margins = [choice.margin for choice in choices.values()]
    for margin in (_host_margin(pool, choices, workload), _sync_margin(pool, choices, workload)):
        if isinstance(margin, Shortage):
            return margin
        margins.append(margin)
    return PoolUse(choices, max(margins))


def _safest(demand: Demand, pool: Pool, search: LayoutSearch, idle_gib: float) -> RoleChoice | Shortage:
    """Return the best choice with the safest margin that any has; ``idle_gib`` is held by other roles on its GPUs."""
    band = memory_band(demand, search.base)
    shortage: Shortage | None = None
    for margin in Margin:
        choice = search.best(available_gib(demand, pool, idle_gib, band.factor(margin)))
        if isinstance(choice, RoleChoice):
            return replace(choice, margin=margin)
        if margin is Margin.EXPECTED or shortage is None:
            shortage = choice
        if isinf(choice.gib):
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
