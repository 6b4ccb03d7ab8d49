"""What of a step's data lies in the object store of each host, and how long readers take to get it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import GIB, RolePlacement
from rlflow.resources.planner.pool import HostSet
from rlflow.resources.planner.sharing import Partition
from rlflow.resources.time.passes import transfer_seconds
from rlflow.resources.workload import Edge, Task, Workload


@dataclass(frozen=True, kw_only=True)
class DataPrediction:
    edges: Mapping[str, float]
    """Bytes of a step, by the node or the source that gives them."""
    store_peak_gib: Mapping[str, float]
    """Of each host's object store, at the fullest moment of a step; hosts that hold none are left out."""


def predict_data(workload: Workload, roles: Mapping[str, RolePlacement], controller: str) -> DataPrediction:
    """Nodes run in their order. An edge is there from its node on until its last reader is done, on the hosts of the
    workers that made it, as many bytes with each; that of no role on the host ``controller``. What is cut out for
    readers on other hosts, and comes to their stores, is not counted: it goes as soon as they have read it."""
    order = {task.node: index for index, task in enumerate(workload.tasks)}
    spans = {edge.name: _span(edge, order) for edge in workload.edges}
    peaks: dict[str, float] = {}
    for moment in order.values():
        held: dict[str, float] = {}
        for edge in workload.edges:
            first, last = spans[edge.name]
            if first <= moment <= last:
                for host, share in _shares(edge, roles, controller).items():
                    held[host] = held.get(host, 0.0) + share * edge.stored / GIB
        for host, gib in held.items():
            peaks[host] = max(peaks.get(host, 0.0), gib)
    return DataPrediction(edges={edge.name: edge.bytes for edge in workload.edges}, store_peak_gib=peaks)


def _span(edge: Edge, order: Mapping[str, int]) -> tuple[int, int]:
    places = [order[node] for node in (edge.name, *edge.readers) if node in order]
    return min(places), max(places)


def _shares(edge: Edge, roles: Mapping[str, RolePlacement], controller: str) -> Mapping[str, float]:
    if edge.role is None:
        return {controller: 1.0}
    shares: dict[str, float] = {}
    workers = roles[edge.role].workers
    for worker in workers:
        host = worker.bundles[0].host
        shares[host] = shares.get(host, 0.0) + 1 / len(workers)
    return shares


def reading_seconds(
    workload: Workload, task: Task, host_set: HostSet, partition: Partition, gpus: tuple[int, ...]
) -> float:
    """Of a task, to get what it reads from the stores where it lies; nothing where all of it is one process."""
    if sum(gpus) == 1:
        return 0.0
    pool_of = {role: index for index, pool in enumerate(partition) for role in pool}
    hosts = [ceil(count / host_set.largest_host) for count in gpus]
    together = sum(gpus) <= host_set.largest_host

    def hosts_of(role: str | None) -> int:
        return 1 if role is None else hosts[pool_of[role]]

    return sum(
        transfer_seconds(
            edge.bytes,
            hosts_of(edge.role),
            hosts_of(task.role),
            host_set.speed,
            crosses=not together,
            same_hosts=pool_of.get(edge.role or "") == pool_of.get(task.role or ""),
        )
        for edge in workload.edges
        if task.node in edge.readers
    )
