"""The best uses of the pools that a search meets, each found once."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Pool, PoolShape, PoolUse, Shortage
from rlflow.resources.planner.search.pool_search import LayoutSearches, best_use


class PoolCache:
    """The best uses of all pools that a search meets, by roles and shape."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self.inputs = inputs
        self._uses: dict[object, PoolUse | Shortage] = {}
        self._searches: dict[object, LayoutSearches] = {}

    def least_seconds(self, roles: tuple[str, ...], gpus: int) -> Mapping[str, float]:
        """Return times that no node is faster than in any use of a pool."""
        pool = self._pool(roles, gpus)
        searches = self._searches_of(pool)
        return {node: least for demand in pool.demands for node, least in searches.least_seconds(demand, pool).items()}

    def use(self, roles: tuple[str, ...], gpus: int) -> PoolUse | Shortage:
        """Return the best use of a pool."""
        return self._use(self._pool(roles, gpus))

    def with_groups(self, roles: Sequence[str], gpus: int, largest: int) -> PoolUse | Shortage:
        """Return the best use of a pool without remainders whose groups have at most ``largest`` GPUs."""
        return self._use(
            Pool(self.inputs.demands_of(roles), PoolShape(((gpus, 1),), largest), self.inputs.host_set(roles))
        )

    def on_hosts(self, roles: Sequence[str], counts: Sequence[int]) -> PoolUse | Shortage:
        """Return the best use of a pool that has so many GPUs of each of several hosts."""
        host_set = self.inputs.host_set(roles)
        # On a host that it shares with others, only its own GPUs count.
        speed = replace(host_set.speed, gpus_per_host=max(counts))
        return self._use(Pool(self.inputs.demands_of(roles), _shape(counts), replace(host_set, speed=speed)))

    def _pool(self, roles: tuple[str, ...], gpus: int) -> Pool:
        """Return a pool without remainders, but with the groups that hosts really hold if it has all GPUs of all."""
        host_set = self.inputs.host_set(roles)
        if len(roles) == len(self.inputs.demands) and gpus == host_set.num_gpus:
            shape = _shape([len(host.usable) for host in host_set.hosts])
        else:
            shape = PoolShape(((gpus, 1),), min(gpus, host_set.largest_host))
        return Pool(self.inputs.demands_of(roles), shape, host_set)

    def _use(self, pool: Pool) -> PoolUse | Shortage:
        key = (pool.roles, pool.shape, pool.host_set.speed.gpus_per_host)
        if key not in self._uses:
            self._uses[key] = best_use(pool, self.inputs.workload, self._searches_of(pool))
        return self._uses[key]

    def _searches_of(self, pool: Pool) -> LayoutSearches:
        """Return the layout searches of a pool's roles, which are the same beside any roles with equal labels."""
        key = (self.inputs.labels(pool.roles), pool.shape, pool.host_set.speed.gpus_per_host)
        return self._searches.setdefault(key, LayoutSearches(self.inputs.workload))


def _shape(counts: Collection[int]) -> PoolShape:
    return PoolShape(tuple(sorted(Counter(counts).items())), max(counts))
