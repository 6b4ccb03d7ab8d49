"""Data of a step in the hosts' object stores: how much there is at the peak, and how long nodes take to read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import GIB, RolePlacement
from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.pools import Partition, pool_indices
from rlflow.resources.time.passes import transfer_seconds
from rlflow.resources.workload import Edge, Task, Workload


@dataclass(frozen=True, kw_only=True)
class DataPrediction:
    """The predicted data of a step."""

    edges: Mapping[str, float]
    """Bytes of a step, by the node or source that gives them."""
    store_peak_gib: Mapping[str, float]
    """The peak of each host's object store within a step; hosts without data are left out."""


def predict_data(workload: Workload, roles: Mapping[str, RolePlacement], controller: str) -> DataPrediction:
    """Predict the peak of each object store.

    Nodes run in order. An edge is stored from its node until its last reader has finished, in equal parts on the hosts
    of the role's workers; an edge without a role is on the host ``controller``. Slices that travel to readers on
    other hosts are not counted, because they are freed as soon as they are read. What is generated ahead is stored for
    as many later steps as ``max_staleness`` allows.
    """
    ahead = workload.ahead
    order = {task.node: index for index, task in enumerate(workload.tasks)}
    spans = {edge.name: _span(edge, order) for edge in workload.edges}
    peaks: dict[str, float] = {}
    for moment in order.values():
        stored: dict[str, float] = {}
        for edge in workload.edges:
            first, last = spans[edge.name]
            steps = int(first <= moment <= last) + (
                ahead.overlap.max_staleness if ahead and edge.name in ahead.nodes else 0
            )
            for host, share in _shares(edge, roles, controller).items() if steps else ():
                stored[host] = stored.get(host, 0.0) + steps * share * edge.stored / GIB
        for host, gib in stored.items():
            peaks[host] = max(peaks.get(host, 0.0), gib)
    return DataPrediction(edges={edge.name: edge.bytes for edge in workload.edges}, store_peak_gib=peaks)


def _span(edge: Edge, order: Mapping[str, int]) -> tuple[int, int]:
    positions = [order[node] for node in (edge.name, *edge.readers) if node in order]
    return min(positions), max(positions)


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
    """Return how long a task takes to fetch its inputs from object stores; nothing if the run is one process.

    A task that runs where its samples lie fetches none of them from other hosts.
    """
    if sum(gpus) == 1:
        return 0.0
    pool_of = pool_indices(partition)
    hosts = [ceil(count / host_set.largest_host) for count in gpus]
    on_one_host = sum(gpus) <= host_set.largest_host

    def num_hosts(role: str | None) -> int:
        return 1 if role is None else hosts[pool_of[role]]

    reader = task.role or task.hosts_of
    replayed = {sync.target for sync in workload.weight_syncs if sync.source == task.role}
    return sum(
        transfer_seconds(
            edge.bytes if edge.role in replayed else edge.bytes - edge.routing,
            num_hosts(edge.role),
            num_hosts(reader),
            host_set.speed,
            crosses=not on_one_host and (edge.role is None or edge.role != task.hosts_of),
            same_hosts=pool_of.get(edge.role or "") == pool_of.get(reader or ""),
        )
        for edge in workload.edges
        if task.node in edge.readers
    )
