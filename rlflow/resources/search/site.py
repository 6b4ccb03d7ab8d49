"""The GPUs that a pool may be made of, as far as its roles must know them."""

from dataclasses import dataclass

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.memory.phases import usable_gib
from rlflow.resources.memory.processes import Sharp
from rlflow.resources.time.speed import Calibration, Efficiency, Speed, slowest, speed_of

# Of a GPU's memory a plan leaves so much for what no term knows.
_MARGIN = 0.05
# Host memory for each GPU where it is not given: hosts of 8 GPUs have 1 to 2 TiB.
_HOST_GIB = 200.0


@dataclass(frozen=True)
class Site:
    hosts: tuple[Host, ...]
    memory_gib: float | None
    """Of the smallest GPU. None: the host's own memory, which is not counted."""
    speed: Speed
    """Of the slowest in each respect."""
    host_gib: float
    """Of host memory for each GPU, where it is scarcest."""
    sharp: Sharp
    """The most that NCCL's buffers for NVLink SHARP take on any of the hosts."""

    @property
    def usable_gib(self) -> float:
        """By a plan, of each GPU."""
        return usable_gib(self.memory_gib) * (1 - _MARGIN) if self.memory_gib is not None else float("inf")

    @property
    def num_gpus(self) -> int:
        return sum(len(host.usable) for host in self.hosts)

    @property
    def largest_host(self) -> int:
        return max(len(host.usable) for host in self.hosts)

    def groups(self, size: int) -> int:
        """So many groups of ``size`` GPUs, each inside a host, there are at most."""
        return sum(len(host.usable) // size for host in self.hosts)


def site_of(cluster: Cluster, label: str | None, calibration: Calibration) -> Site:
    """The hosts with a label. Raises PlacementError when there are none, or figures are missing."""
    labelled = cluster.hosts_with(label)
    if not labelled:
        names = sorted({name for host in cluster.hosts for name in (*host.labels, host.gpu)})
        raise PlacementError("label", f"no host has the label '{label}'", known=names)
    hosts = tuple(host for host in labelled if host.usable)
    if not hosts:
        raise PlacementError("label", f"the hosts with the label '{label}' are reserved, or have no free GPU")
    kinds = {host.gpu for host in hosts}
    speeds = [
        speed_of(
            cluster.gpus[kind],
            max(host.gpus for host in hosts if host.gpu == kind),
            calibration.get(kind, Efficiency()),
        )
        for kind in sorted(kinds)
    ]
    memories = [memory for kind in kinds if (memory := cluster.gpus[kind].memory_gib) is not None]
    shares = [host.memory_gib / len(host.usable) if host.memory_gib else _HOST_GIB for host in hosts]
    sharp = Sharp(max(cluster.gpus[kind].nvls_channels for kind in kinds), max(host.gpus for host in hosts))
    return Site(hosts, min(memories, default=None), slowest(speeds), min(shares), sharp)
