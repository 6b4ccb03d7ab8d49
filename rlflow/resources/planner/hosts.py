"""The hosts that a pool may use, reduced to what its roles must know."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import inf

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.memory.overheads import Sharp
from rlflow.resources.memory.phases import usable_gib
from rlflow.resources.time.calibration import Calibration, default_efficiency, engine_key
from rlflow.resources.time.speed import Speed, gpu_speed, slowest


@dataclass(frozen=True)
class HostSet:
    """The hosts that a pool may use, reduced to what its roles must know."""

    hosts: tuple[Host, ...]
    memory_gib: float | None
    """Memory of the smallest GPU; None for CPUs, whose memory is not modelled."""
    speed: Speed
    """The slowest speed in each respect."""
    host_gib: float
    """Host memory for each GPU, on the host that states least."""
    assumed_host_gib: float
    """The same for hosts that do not state theirs: as much as their GPUs have, which is less than machines have."""
    sharp: Sharp
    """The largest buffers for NVLink SHARP on any of the hosts."""

    @property
    def counts_memory(self) -> bool:
        """Return whether memory is modelled."""
        return self.memory_gib is not None

    @property
    def usable_gib(self) -> float:
        """Return the memory of each GPU that a plan may use."""
        return usable_gib(self.memory_gib) if self.memory_gib is not None else float("inf")

    @cached_property
    def num_gpus(self) -> int:
        """Return the number of usable GPUs."""
        return sum(len(host.usable) for host in self.hosts)

    @cached_property
    def largest_host(self) -> int:
        """Return the number of usable GPUs of the largest host."""
        return max(len(host.usable) for host in self.hosts)


def select_hosts(cluster: Cluster, labels: Collection[str], calibration: Calibration) -> HostSet:
    """Return the hosts with all labels. Raises PlacementError when there are none, or when figures are missing."""
    labelled = [host for host in cluster.hosts if all(host.has(label) for label in labels)]
    named = ("label " if len(labels) == 1 else "labels ") + " and ".join(f"'{label}'" for label in sorted(labels))
    if not labelled:
        names = sorted({name for host in cluster.hosts for name in (*host.labels, host.gpu)})
        raise PlacementError("label", f"no host has the {named}", known=names, fix="use one of these")
    hosts = tuple(host for host in labelled if host.usable)
    if not hosts:
        fact = f"the hosts with the {named} are reserved, or have no free GPU"
        raise PlacementError("label", fact, fix="other labels, or a cluster with more free GPUs")
    kinds = {host.gpu for host in hosts}
    speeds = [
        gpu_speed(
            cluster.gpus[kind],
            max(host.gpus for host in hosts if host.gpu == kind),
            calibration.get(kind) or default_efficiency(cluster.gpus[kind]),
            engines={
                key.partition("/")[2]: efficiency
                for key, efficiency in calibration.items()
                if key.startswith(engine_key(kind, ""))
            },
            share=1 / sum(host.gpus for host in cluster.hosts) if cluster.gpus[kind].memory_gib is None else 1.0,
        )
        for kind in sorted(kinds)
    ]
    memories = [memory for kind in kinds if (memory := cluster.gpus[kind].memory_gib) is not None]
    stated = [host.memory_gib / len(host.usable) for host in hosts if host.memory_gib is not None]
    assumed = [gib for host in hosts if host.memory_gib is None and (gib := cluster.memory_gib(host)) is not None]
    sharp = Sharp(max(cluster.gpus[kind].nvls_channels for kind in kinds), max(host.gpus for host in hosts))
    return HostSet(
        hosts, min(memories, default=None), slowest(speeds), min(stated, default=inf), min(assumed, default=inf), sharp
    )
