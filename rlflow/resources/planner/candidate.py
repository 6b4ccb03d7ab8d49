"""Candidates: ways to share GPUs with sizes of pools, the best use of each pool, and the simulated step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rlflow.resources.layout import RolePlacement, workers
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.placement_solver import Counts, PoolRequest, gpu_ids
from rlflow.resources.planner.pool import RoleChoice, Shortage
from rlflow.resources.planner.prediction.data_placement import reading_seconds
from rlflow.resources.planner.prediction.task_times import collecting_seconds, host_task_seconds, weight_sync_seconds
from rlflow.resources.planner.search.pool_search import PoolUse
from rlflow.resources.planner.search.pool_uses import PoolUses
from rlflow.resources.planner.search.sharing import Partition, pool_indices
from rlflow.resources.planner.simulate import Schedule, simulate


@dataclass(frozen=True)
class Candidate:
    """A way to share with pool sizes, with the best use of each pool and the simulated step."""

    partition: Partition
    gpus: tuple[int, ...]
    """The size of each pool."""
    uses: tuple[PoolUse, ...]
    schedule: Schedule

    @property
    def pool_of(self) -> dict[str, int]:
        """Return the index of each role's pool."""
        return pool_indices(self.partition)

    @property
    def choices(self) -> dict[str, RoleChoice]:
        """Return the choice of each role."""
        return {role: choice for use in self.uses for role, choice in use.choices.items()}

    @property
    def margin(self) -> Margin:
        """Return the smallest room that is left for the error of a predicted memory."""
        return max(use.margin for use in self.uses)

    @property
    def used_gpus(self) -> int:
        """Return the number of GPUs that at least one role uses."""
        return sum(use.num_gpus for use in self.uses)


@dataclass(frozen=True)
class PlacedCandidate:
    """A candidate with the groups that its hosts hold."""

    candidate: Candidate
    requests: tuple[PoolRequest, ...]
    counts: Counts
    """The GPUs of each pool on each host."""

    @property
    def seconds(self) -> float:
        """Return the length of a step."""
        return self.candidate.schedule.step_seconds

    @property
    def crossed(self) -> int:
        """Return the number of (pool, host) pairs."""
        return sum(gpus > 0 for taken in self.counts for gpus in taken)

    def roles(self, of: PoolUses) -> Mapping[str, RolePlacement]:
        """Return the layout of each role, and its workers on their GPUs."""
        shares = gpu_ids(self.requests, of.cluster, self.counts)
        placed = {
            role: RolePlacement(choice.layout, tuple(workers(choice.layout, share)))
            for share, used in zip(shares, self.candidate.uses, strict=True)
            for role, choice in used.choices.items()
        }
        return dict(sorted(placed.items()))


@dataclass(frozen=True)
class RejectedCandidate:
    """A way to share with pool sizes that does not fit."""

    partition: Partition
    gpus: tuple[int, ...]
    shortage: Shortage


def describe_pools(partition: Sequence[Sequence[str]], gpus: Sequence[int]) -> str:
    """Describe pools with their GPUs: ``rollout on 4, actor + reference on 12``."""
    if len(partition) == 1:
        return f"all roles colocated on {gpus[0]}" if len(partition[0]) > 1 else f"{partition[0][0]} on {gpus[0]}"
    return ", ".join(f"{' + '.join(roles)} on {count}" for roles, count in zip(partition, gpus, strict=True))


def simulated(partition: Partition, gpus: tuple[int, ...], uses: Sequence[PoolUse], of: PoolUses) -> Candidate:
    """Return the candidate with these uses of its pools."""
    seconds = {node: value for used in uses for node, value in used.seconds.items()}
    seconds |= _host_seconds(partition, gpus, of)
    pool_of = pool_indices(partition)
    for task in of.workload.tasks:
        role = task.role or task.hosts_of
        host_set = of.host_set(partition[0 if role is None else pool_of[role]])
        seconds[task.node] += reading_seconds(of.workload, task, host_set, partition, gpus)
    layouts = {role: choice.layout for used in uses for role, choice in used.choices.items()}
    for sync in of.workload.copies:
        speed = of.host_set(partition[pool_of[sync.target]]).speed
        same_gpus = pool_of[sync.source] == pool_of[sync.target]
        source, target = of.demands[sync.source], of.demands[sync.target]
        given, followed = layouts[sync.source].num_gpus, layouts[sync.target].num_gpus
        seconds[sync.node] = weight_sync_seconds(source, target, given, followed, speed, same_gpus=same_gpus)
    return Candidate(partition, gpus, tuple(uses), simulate(of.workload, seconds, pool_of))


def least_other_seconds(partition: Partition, of: PoolUses, *, single: bool) -> Mapping[str, float]:
    """Return the least time of each node without a role, and of each weight sync.

    ``single``: pools may have a single GPU, inside which weights are copied.
    """
    most = tuple(of.host_set(pool).num_gpus for pool in partition)
    seconds, pool_of = _host_seconds(partition, most, of), pool_indices(partition)
    for task in of.workload.tasks:
        if task.role is not None:
            seconds[task.node] = 0.0
    for sync in of.workload.copies:
        speed = of.host_set(partition[pool_of[sync.target]]).speed
        source, target = of.demands[sync.source], of.demands[sync.target]
        same_gpus = pool_of[sync.source] == pool_of[sync.target]
        seconds[sync.node] = weight_sync_seconds(source, target, 2, 0, speed, same_gpus=same_gpus)
        if single or None not in (source.pinned("data_parallel_size"), target.pinned("data_parallel_size")):
            one = weight_sync_seconds(source, target, 1, 1, speed, same_gpus=same_gpus)
            seconds[sync.node] = min(one, seconds[sync.node])
    return seconds


def _host_seconds(partition: Partition, gpus: tuple[int, ...], of: PoolUses) -> dict[str, float]:
    """Return the time of each node without a role, except that for reading its inputs.

    Hosts that are simulated on one machine share its CPUs.
    """
    speed, pool_of = of.host_set(partition[0]).speed, pool_indices(partition)
    seconds: dict[str, float] = {}
    for task in of.workload.tasks:
        if task.role is None:
            num_hosts = 1
            if task.hosts_of is not None and not speed.is_cpu:
                pool = pool_of[task.hosts_of]
                num_hosts = ceil(gpus[pool] / of.host_set(partition[pool]).largest_host)
            collecting = collecting_seconds(of.workload, task, speed, num_hosts)
            seconds[task.node] = host_task_seconds(task, of.demands.values(), speed, num_hosts) + collecting
    return seconds
