"""The inputs of planning: the demands of roles, the work of a step, the cluster, and measured efficiencies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.planner.hosts import HostSet, select_hosts
from rlflow.resources.planner.pools import Partition
from rlflow.resources.time.calibration import Calibration
from rlflow.resources.workload import Workload


@dataclass(frozen=True)
class PlannerInputs:
    """Everything that a plan follows from."""

    demands: dict[str, Demand]
    """The demands of the roles, by role in alphabetical order."""
    workload: Workload
    cluster: Cluster
    calibration: Calibration
    scarce_types: frozenset[str] = frozenset()
    """Number types of roles that not all hosts compute in. They are labels of the hosts that do."""
    _host_sets: dict[frozenset[str], HostSet] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, demands: Collection[Demand], workload: Workload, cluster: Cluster, calibration: Calibration
    ) -> "PlannerInputs":
        """Return the inputs for demands in any order."""
        by_role = {demand.role: demand for demand in sorted(demands, key=lambda demand: demand.role)}
        types, hosts = {demand.dtype for demand in demands}, cluster.hosts
        scarce = frozenset(dtype for dtype in types if not all(cluster.computes_in(host, dtype) for host in hosts))
        return cls(by_role, workload, _labelled(cluster, scarce), calibration, scarce)

    def demands_of(self, roles: Sequence[str]) -> tuple[Demand, ...]:
        """Return the demands of a pool's roles."""
        return tuple(self.demands[role] for role in roles)

    def labels(self, roles: Sequence[str]) -> frozenset[str]:
        """Return the labels that the hosts of a pool with these roles have."""
        demands = self.demands_of(roles)
        types = self.scarce_types.intersection(demand.dtype for demand in demands)
        return frozenset(label for demand in demands if (label := demand.pins.label) is not None) | types

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

    def num_gpus(self, partition: Partition) -> int:
        """Return the number of GPUs that any of the pools may use."""
        hosts = {host.name: len(host.usable) for pool in partition for host in self.host_set(pool).hosts}
        return sum(hosts.values())


def _labelled(cluster: Cluster, types: Collection[str]) -> Cluster:
    """Return the cluster with those of the number types that each host computes in as labels."""
    labels = {
        host.name: [dtype for dtype in sorted(types) if cluster.computes_in(host, dtype)] for host in cluster.hosts
    }
    hosts = tuple(replace(host, labels=(*host.labels, *labels[host.name])) for host in cluster.hosts)
    return replace(cluster, hosts=hosts) if types else cluster
