"""The best use of one pool by its roles."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import inf, isinf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Offload
from rlflow.resources.memory.state import total_gib
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Pool, PoolUse, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import available_gib, host_memory, memory_band, sync_margin
from rlflow.resources.planner.prediction.task_times import with_turn
from rlflow.resources.planner.search.degrees import PoolPolicy, base_layout
from rlflow.resources.planner.search.layout_search import LayoutSearch
from rlflow.resources.planner.search.staying import with_fewer_turns
from rlflow.resources.workload import Workload

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")


class LayoutSearches:
    """The layout searches of roles on the same GPUs, each made once, whatever roles are beside them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._searches: dict[object, LayoutSearch] = {}

    def of(self, demand: Demand, policy: PoolPolicy, pool: Pool) -> LayoutSearch:
        """Return the search of a role under a policy; policies that do not differ for the role share it."""
        state, tasks = policy.state_of(demand), self._workload.on_gpus_of(demand.role, pool.roles)
        key = (demand.role, state, *(task.steps for task in tasks))
        if key not in self._searches:
            base = base_layout(demand, state, pool.shape)
            self._searches[key] = LayoutSearch(demand, tasks, base, pool.shape, pool.host_set)
        return self._searches[key]

    def least_seconds(self, demand: Demand, pool: Pool) -> Mapping[str, float]:
        """Return times that no node of a role is faster than: those with nothing offloaded."""
        searches = [self.of(demand, policy, pool) for policy in _policies((demand,), "none")]
        nodes = searches[0].least_node_seconds
        return {node: min(search.least_node_seconds[node] for search in searches) for node in nodes}


def best_use(pool: Pool, workload: Workload, searches: LayoutSearches) -> PoolUse | Shortage:
    """Return the fastest way in which all roles of a pool fit together, or the shortage of the nearest one.

    What roles keep on the GPUs while others work is decided for the whole pool, then each role's own layout. Offloading
    is tried only where nothing fits safely without it, and taken only where the plan is safer with it.
    """
    shortages: list[Shortage] = []
    best: PoolUse | None = None
    for offload in _OFFLOADS:
        without = best
        for policy in _policies(pool.demands, offload):
            below = best.total if best is not None and best.margin is Margin.SAFE else inf
            use = _use_under(policy, pool, workload, searches, below)
            if isinstance(use, Shortage):
                shortages.append(use)
                continue
            under = {demand.role: searches.of(demand, policy, pool) for demand in pool.demands}
            use = with_fewer_turns(pool, use, workload, under)
            if (without is None or use.margin < without.margin) and (
                best is None or (use.margin, use.total) < (best.margin, best.total)
            ):
                best = use
        if best is not None and best.margin is Margin.SAFE:
            break
        if not any(demand.job == "train" and "data" in demand.parallel for demand in pool.demands):
            break
    return best or min(shortages, key=lambda shortage: shortage.gib)


def _policies(demands: Collection[Demand], offload: Offload) -> Iterator[PoolPolicy]:
    spread = any("data" in demand.parallel for demand in demands)
    jobs = {demand.job for demand in demands}
    sleeping = (False, True) if len(demands) > 1 and spread else (False,)
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
    """Return the best use of a pool under one policy, if it can take less than ``below`` seconds without turns."""
    layouts = {demand.role: searches.of(demand, policy, pool) for demand in pool.demands}
    least_seconds = sum(search.least_seconds for search in layouts.values())
    is_slower = Shortage(pool.demands[0].role, inf, "another policy is as fast")
    # A role without any layout has an infinite time, and its shortage says why.
    if below <= least_seconds < inf:
        return is_slower
    sleeps = {demand.role: _sleeps(demand, policy, pool) for demand in pool.demands}
    idle = {role: search.idle(sleeps=sleeps[role]) if pool.is_shared else {} for role, search in layouts.items()}
    idle_gib = {role: total_gib(terms) for role, terms in idle.items()}
    choices = {}
    for demand in pool.demands:
        search, role = layouts[demand.role], demand.role
        safest = _safest(demand, pool, search, sum(idle_gib.values()) - idle_gib[role])
        if isinstance(safest, Shortage):
            return safest
        choice, margin = safest
        layout = replace(choice.layout, sleeps=True) if sleeps[role] else choice.layout
        choices[role] = replace(choice, layout=layout, idle=idle[role], margin=margin)
        least_seconds += sum(choice.seconds.values()) - search.least_seconds
        if below <= least_seconds < inf:
            return is_slower
    margins = [choice.margin for choice in choices.values()]
    for pool_margin in (_host_margin(pool, choices, workload), sync_margin(pool, choices, workload)):
        if isinstance(pool_margin, Shortage):
            return pool_margin
        margins.append(pool_margin)
    in_turns = {demand.role: with_turn(choices[demand.role], demand, pool) for demand in pool.demands}
    return PoolUse(in_turns, max(margins))


def _sleeps(demand: Demand, policy: PoolPolicy, pool: Pool) -> bool:
    """Return whether a role gives up its memory while others work: engines always do, other roles as decided."""
    if not pool.is_shared:
        return False
    if demand.job == "serve":
        return "tensor" in demand.parallel and pool.counts_memory
    return policy.sleeps and "data" in demand.parallel


def _safest(demand: Demand, pool: Pool, search: LayoutSearch, idle_gib: float) -> tuple[RoleChoice, Margin] | Shortage:
    """Return the best choice with the safest margin that any has; ``idle_gib`` is held by other roles on its GPUs."""
    band = memory_band(demand, search.base)
    shortage: Shortage | None = None
    for margin in Margin:
        choice = search.best(available_gib(demand, pool, idle_gib, band.factor(margin)), is_shared=pool.is_shared)
        if isinstance(choice, RoleChoice):
            return choice, margin
        if margin is Margin.EXPECTED or shortage is None:
            shortage = choice
        if isinf(choice.gib):
            break
    assert shortage is not None
    return shortage


def _host_margin(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Margin | Shortage:
    """Return the margin of host memory: what hosts state is a limit, what they are assumed to have is not."""
    offloaded = sum(total_gib(host_memory(demand, choices[demand.role], workload)) for demand in pool.demands)
    if offloaded > pool.host_set.host_gib:
        what = f"{offloaded:.0f} GiB of host memory for each GPU, of {pool.host_set.host_gib:.0f}"
        return Shortage(pool.demands[0].role, offloaded - pool.host_set.host_gib, what)
    return Margin.SAFE if offloaded <= pool.host_set.assumed_host_gib else Margin.EXPECTED
