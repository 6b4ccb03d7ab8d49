"""The pools that a search meets: their hosts, what their roles pin, and their best uses, each found once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pool import HostSet, Pool, Shortage, select_hosts
from rlflow.resources.planner.search.pool_search import PoolUse, RoleSearches, best_use, least_use
from rlflow.resources.planner.search.sharing import Partition, PoolPins, pool_pins
from rlflow.resources.time.calibration import Calibration
from rlflow.resources.workload import Workload


class PoolUses:
    """The best uses of all pools that a search meets, each found once."""

    def __init__(
        self, demands: Sequence[Demand], workload: Workload, cluster: Cluster, calibration: Calibration
    ) -> None:
        self.demands = {demand.role: demand for demand in sorted(demands, key=lambda demand: demand.role)}
        self.workload = workload
        self.cluster = cluster
        self.calibration = calibration
        self._host_sets: dict[frozenset[str], HostSet] = {}
        self._uses: dict[object, PoolUse | Shortage] = {}
        self._found: dict[tuple[tuple[str, ...], int], PoolUse | Shortage] = {}
        self._least: dict[object, tuple[Margin, Mapping[str, float]]] = {}
        self._searches: dict[object, RoleSearches] = {}

    def labels(self, roles: Sequence[str]) -> frozenset[str]:
        """Return the labels that the hosts of a pool with these roles have."""
        return frozenset(label for role in roles if (label := self.demands[role].pins.label) is not None)

    def host_set(self, roles: Sequence[str]) -> HostSet:
        """Return the hosts that the roles may use together. Raises PlacementError when there are none."""
        labels = self.labels(roles)
        if labels not in self._host_sets:
            try:
                self._host_sets[labels] = select_hosts(self.cluster, labels, self.calibration)
            except PlacementError as error:
                labelled = next((role for role in roles if self.demands[role].pins.label is not None), roles[0])
                error.path = f"roles.{labelled}.{error.path}" if error.path == "label" else error.path
                raise
        return self._host_sets[labels]

    def total(self, partition: Partition) -> int:
        """Return the number of GPUs that any of the pools may use."""
        hosts = {host.name: len(host.usable) for pool in partition for host in self.host_set(pool).hosts}
        return sum(hosts.values())

    def pins(self, roles: Sequence[str]) -> PoolPins:
        """Return what the roles of a pool pin. Raises PlacementError when they contradict each other."""
        return pool_pins([self.demands[role] for role in roles])

    def ideal(self, roles: Sequence[str], gpus: int, *, largest_group: int | None = None) -> PoolUse | Shortage:
        """Return the best use of a pool whose groups lie inside hosts without remainders."""
        host_set = self.host_set(roles)
        if gpus > host_set.num_gpus:
            return Shortage(roles[0], float(gpus - host_set.num_gpus), f"{gpus} of {host_set.num_gpus} GPUs")
        largest = min(gpus, host_set.largest_host if largest_group is None else largest_group)
        return self._use(roles, gpus, lambda size: gpus // size, largest, host_set, (gpus, largest))

    def use(self, roles: tuple[str, ...], gpus: int) -> PoolUse | Shortage:
        """Return the best use of a pool; where it has all GPUs of all hosts, with the groups that these really hold."""
        host_set = self.host_set(roles)
        if len(roles) == len(self.demands) and gpus == host_set.num_gpus:
            largest = min(gpus, host_set.largest_host)
            found = self._use(roles, gpus, host_set.groups, largest, host_set, "whole")
        else:
            found = self.ideal(roles, gpus)
        self._found[roles, gpus] = found
        return found

    def known(self, roles: tuple[str, ...], gpus: int) -> PoolUse | Shortage | None:
        """Return what ``use`` has returned before; None if it was not called."""
        return self._found.get((roles, gpus))

    def least_use(self, role: str, roles: Sequence[str], gpus: int) -> tuple[Margin, Mapping[str, float]]:
        """Return the safest margin and the least time of each node of one of the roles of a pool."""
        trains = any(self.demands[other].trains for other in roles)
        key = (role, self.labels(roles), gpus, len(roles) > 1, trains)
        if key not in self._least:
            host_set = self.host_set(roles)
            largest = min(gpus, host_set.largest_host)
            pool = Pool(self._demands_of(roles), gpus, lambda size: gpus // size, host_set, largest)
            self._least[key] = least_use(self.demands[role], pool, self._searches_of(roles, (gpus, largest)))
        return self._least[key]

    def on_hosts(self, roles: Sequence[str], counts: Sequence[int]) -> PoolUse | Shortage:
        """Return the best use of a pool that has so many GPUs of each of several hosts."""
        equal = Counter(counts)
        host_set, largest = self.host_set(roles), max(counts)
        # On a host that it shares with others, only its own GPUs count.
        host_set = replace(host_set, speed=replace(host_set.speed, gpus_per_host=largest))

        def groups(size: int) -> int:
            return sum(count // size * hosts for count, hosts in equal.items())

        return self._use(roles, sum(counts), groups, largest, host_set, tuple(sorted(equal.items())))

    def _use(
        self,
        roles: Sequence[str],
        gpus: int,
        groups: Callable[[int], int],
        largest: int,
        host_set: HostSet,
        shape: object,
    ) -> PoolUse | Shortage:
        key = (tuple(roles), shape)
        if key not in self._uses:
            pool = Pool(self._demands_of(roles), gpus, groups, host_set, largest)
            self._uses[key] = best_use(pool, self.workload, self._searches_of(roles, shape))
        return self._uses[key]

    def _demands_of(self, roles: Sequence[str]) -> tuple[Demand, ...]:
        return tuple(self.demands[role] for role in roles)

    def _searches_of(self, roles: Sequence[str], shape: object) -> RoleSearches:
        """Return the layouts of roles on GPUs of this shape, which are the same beside any roles with equal labels."""
        return self._searches.setdefault((self.labels(roles), shape), RoleSearches(self.workload))
