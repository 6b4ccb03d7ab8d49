"""The best uses of the pools that a search meets, each found once."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Pool, PoolShape, PoolUse, Shortage
from rlflow.resources.planner.search.pool_search import LayoutSearches, best_use


class PoolCache:
    """The best uses of all pools that a search meets, by roles and shape."""

    def __init__(self, inputs: PlannerInputs) -> None:
        self.inputs = inputs
        self._uses: dict[object, PoolUse | Shortage] = {}
        self._by_size: dict[tuple[tuple[str, ...], int], PoolUse | Shortage] = {}
        self._searches: dict[object, LayoutSearches] = {}

    def ideal(self, roles: Sequence[str], gpus: int, *, largest_group: int | None = None) -> PoolUse | Shortage:
        """Return the best use of a pool whose groups lie inside hosts without remainders."""
        host_set = self.inputs.host_set(roles)
        if gpus > host_set.num_gpus:
            return Shortage(roles[0], float(gpus - host_set.num_gpus), f"{gpus} of {host_set.num_gpus} GPUs")
        largest = min(gpus, host_set.largest_host if largest_group is None else largest_group)
        return self._use(roles, PoolShape(((gpus, 1),), largest), host_set)

    def use(self, roles: tuple[str, ...], gpus: int) -> PoolUse | Shortage:
        """Return the best use of a pool; where it has all GPUs of all hosts, with the groups that these really hold."""
        if (roles, gpus) not in self._by_size:
            host_set = self.inputs.host_set(roles)
            if len(roles) == len(self.inputs.demands) and gpus == host_set.num_gpus:
                whole_hosts = _shape([len(host.usable) for host in host_set.hosts])
                self._by_size[roles, gpus] = self._use(roles, whole_hosts, host_set)
            else:
                self._by_size[roles, gpus] = self.ideal(roles, gpus)
        return self._by_size[roles, gpus]

    def on_hosts(self, roles: Sequence[str], counts: Sequence[int]) -> PoolUse | Shortage:
        """Return the best use of a pool that has so many GPUs of each of several hosts."""
        host_set = self.inputs.host_set(roles)
        # On a host that it shares with others, only its own GPUs count.
        speed = replace(host_set.speed, gpus_per_host=max(counts))
        return self._use(roles, _shape(counts), replace(host_set, speed=speed))

    def _use(self, roles: Sequence[str], shape: PoolShape, host_set: HostSet) -> PoolUse | Shortage:
        gpus = (shape, host_set.speed.gpus_per_host)
        if (key := (tuple(roles), gpus)) not in self._uses:
            pool = Pool(self.inputs.demands_of(roles), shape, host_set)
            # A role's layouts are the same beside any roles with equal labels.
            searches = self._searches.setdefault(
                (self.inputs.labels(roles), gpus), LayoutSearches(self.inputs.workload)
            )
            self._uses[key] = best_use(pool, self.inputs.workload, searches)
        return self._uses[key]


def _shape(counts: Collection[int]) -> PoolShape:
    return PoolShape(tuple(sorted(Counter(counts).items())), max(counts))
