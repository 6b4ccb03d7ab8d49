"""The times of all nodes of a step, for one way to share GPUs with any sizes of its pools."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil

import numpy as np

from rlflow.resources.planner.candidate import Candidate
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Partition, PoolUse, pool_indices
from rlflow.resources.planner.prediction.data_placement import reading_seconds
from rlflow.resources.planner.prediction.task_times import collecting_seconds, host_task_seconds, weight_sync_seconds
from rlflow.resources.planner.simulate import FloatArray, StepScheduler
from rlflow.resources.workload import WeightSync


class PartitionTimes:
    """The step of one way to share GPUs."""

    def __init__(self, inputs: PlannerInputs, partition: Partition) -> None:
        self._inputs, self._partition = inputs, partition
        self._pool_of = pool_indices(partition)
        self._largest_hosts = sorted({inputs.host_set(roles).largest_host for roles in partition})
        self._scheduler = StepScheduler(inputs.workload, self._pool_of)
        read = {node for edge in inputs.workload.edges for node in edge.readers}
        self._readers = [task for task in inputs.workload.tasks if task.node in read]
        self._data_seconds: dict[object, tuple[Mapping[str, float], Mapping[str, float]]] = {}
        self._sync_seconds = cache(self._find_sync_seconds)

    def candidate(self, gpus: tuple[int, ...], uses: Sequence[PoolUse]) -> Candidate:
        """Return the candidate with these sizes and uses of its pools."""
        return Candidate(self._partition, gpus, tuple(uses), self._scheduler.schedule(self._node_seconds(gpus, uses)))

    def least_step_seconds(self, seconds: Mapping[str, FloatArray], num_sizes: int) -> FloatArray:
        """Return bounds of the lengths of steps [S], for bounds of the times of roles' nodes [S].

        All other nodes take no time, and weight syncs stay inside a host.
        """
        none = np.zeros(num_sizes)
        syncs = {
            sync.node: none + min(self._sync_seconds(sync, gpus, gpus) for gpus in (1, 2))
            for sync in self._inputs.workload.weight_syncs
        }
        rows = [{**seconds, **syncs}.get(node, none) for node in self._scheduler.nodes]
        return self._scheduler.step_seconds(np.array(rows))

    def _node_seconds(self, gpus: tuple[int, ...], uses: Sequence[PoolUse]) -> dict[str, float]:
        host, reading = self._seconds_of_data(gpus)
        seconds = dict(host)
        for use in uses:
            seconds |= use.seconds
        for node, reading_s in reading.items():
            seconds[node] += reading_s
        for sync in self._inputs.workload.weight_syncs:
            source, target = (uses[self._pool_of[role]].choices[role].layout for role in (sync.source, sync.target))
            seconds[sync.node] = self._sync_seconds(sync, source.num_gpus, target.num_gpus)
            if self._pool_of[sync.source] == self._pool_of[sync.target] and target.sleeps and not target.receives_awake:
                # The role that sends gives up its memory before and after.
                efficiency = self._inputs.host_set(self._partition[self._pool_of[sync.source]]).speed.efficiency
                seconds[sync.node] += efficiency.turn_s
        return seconds

    def _seconds_of_data(self, gpus: tuple[int, ...]) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the time of each node without a role, and the time in which each node reads its inputs.

        Both follow from the number of hosts of each pool.
        """
        total = sum(gpus)
        hosts = [(total <= size, *(ceil(count / size) for count in gpus)) for size in self._largest_hosts]
        key = (total == 1, *hosts)
        if key not in self._data_seconds:
            host, reading = self._host_seconds(gpus), self._reading_seconds(gpus)
            self._data_seconds[key] = host, {node: seconds for node, seconds in reading.items() if seconds}
        return self._data_seconds[key]

    def _host_seconds(self, gpus: tuple[int, ...]) -> dict[str, float]:
        """Return the time of each node without a role, except that for reading its inputs.

        Hosts that are simulated on one machine share its CPUs.
        """
        inputs, workload = self._inputs, self._inputs.workload
        speed = inputs.host_set(self._partition[0]).speed
        seconds: dict[str, float] = {}
        for task in workload.tasks:
            if task.role is None:
                num_hosts = 1
                if task.hosts_of is not None and not speed.is_cpu:
                    pool = self._pool_of[task.hosts_of]
                    num_hosts = ceil(gpus[pool] / inputs.host_set(self._partition[pool]).largest_host)
                collecting = collecting_seconds(workload, task, speed, num_hosts)
                seconds[task.node] = host_task_seconds(task, inputs.demands.values(), speed, num_hosts) + collecting
        return seconds

    def _reading_seconds(self, gpus: tuple[int, ...]) -> dict[str, float]:
        seconds = {}
        for task in self._readers:
            role = task.role or task.hosts_of
            host_set = self._inputs.host_set(self._partition[0 if role is None else self._pool_of[role]])
            seconds[task.node] = reading_seconds(self._inputs.workload, task, host_set, self._partition, gpus)
        return seconds

    def _find_sync_seconds(self, sync: WeightSync, source_gpus: int, target_gpus: int) -> float:
        source, target = self._pool_of[sync.source], self._pool_of[sync.target]
        return weight_sync_seconds(
            self._inputs.demands[sync.source],
            self._inputs.demands[sync.target],
            source_gpus,
            target_gpus,
            self._inputs.host_set(self._partition[target]).speed,
            same_gpus=source == target,
        )
