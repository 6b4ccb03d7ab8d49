"""The schedule of a step: when each task runs, by list scheduling of the graph over pools of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.resources.workload import Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# A streaming task works on parts; its last part waits for the last of its input.
PARTS = 8


@dataclass(frozen=True, kw_only=True)
class TaskSpan:
    """The time of one task, in seconds from the start of the step."""

    node: str
    start: float
    end: float
    pools: tuple[int, ...]
    """The pools that work on it; none: the controller."""
    waits_for: str | None
    """The task whose end is its start; None at the start of the step."""

    @property
    def seconds(self) -> float:
        """Return how long the task takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Schedule:
    """The spans of all tasks of a step."""

    spans: tuple[TaskSpan, ...]
    pools: int

    @property
    def step_seconds(self) -> float:
        """Return the length of the step."""
        return max((span.end for span in self.spans), default=0.0)

    def idle_share(self, pool: int) -> float:
        """Return the share of the step in which no task runs on the pool."""
        step = self.step_seconds
        busy = sum(span.seconds for span in self.spans if pool in span.pools)
        return max(0.0, 1 - busy / step) if step else 0.0

    @property
    def critical_path(self) -> tuple[str, ...]:
        """Return the chain of tasks from the start of the step to its end."""
        by_node = {span.node: span for span in self.spans}
        if not by_node:
            return ()
        last = max(self.spans, key=lambda span: span.end)
        path = [last.node]
        while (before := by_node[path[-1]].waits_for) is not None:
            path.append(before)
        return tuple(reversed(path))


class StepScheduler:
    """The tasks and weight syncs of a step, in order, on the pools of its roles. A pool does one task at a time.

    Tasks that run ahead of their step on pools of their own belong to a later one, so the others do not wait for them.
    Both begin with new weights, and the next weight sync waits for both.
    """

    def __init__(self, workload: Workload, pool_of: Mapping[str, int]) -> None:
        self.nodes = [task.node for task in workload.tasks] + [sync.node for sync in workload.weight_syncs]
        self._pools: list[tuple[int, ...]] = [
            (pool_of[task.role],) if task.role is not None else () for task in workload.tasks
        ]
        # Outputs of tasks that run ahead are there when their step begins, so only such tasks wait for each other.
        takes_turns = workload.takes_turns({role: (pool,) for role, pool in pool_of.items()})
        ahead = workload.ahead.nodes if workload.ahead and not takes_turns else ()
        after = [[node for node in task.after if task.node in ahead or node not in ahead] for task in workload.tasks]
        for sync in workload.weight_syncs:
            self._pools.append(tuple(sorted({pool_of[sync.source], pool_of[sync.target]})))
            after.append([task.node for task in workload.tasks if task.role == sync.source and task.kind == "update"])
        self._after = [[self.nodes.index(node) for node in nodes] for nodes in after]
        self._streams = [task.streams for task in workload.tasks] + [False] * len(workload.weight_syncs)
        self._num_pools = len(set(pool_of.values()))

    def schedule(self, seconds: Mapping[str, float]) -> Schedule:
        """Return the schedule of a step; ``seconds`` has every node and weight sync."""
        starts, ends, waits = self._times(np.array([[seconds[node]] for node in self.nodes]).reshape(-1, 1))
        spans = [
            TaskSpan(
                node=node,
                start=start,
                end=end,
                pools=pools,
                waits_for=None if waited < 0 else self.nodes[waited],
            )
            for node, pools, start, end, waited in zip(
                self.nodes, self._pools, starts[:, 0].tolist(), ends[:, 0].tolist(), waits[:, 0].tolist(), strict=True
            )
        ]
        return Schedule(tuple(spans), self._num_pools)

    def step_seconds(self, seconds: FloatArray) -> FloatArray:
        """Return the lengths of many steps [S]; ``seconds`` has a row for each node and weight sync [N, S]."""
        _, ends, _ = self._times(seconds)
        longest: FloatArray = np.max(ends, axis=0, initial=0.0)
        return longest

    def _times(self, seconds: FloatArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return the start and the end of each node in each step, and the node whose end is its start, or -1."""
        starts, ends, waits = np.zeros_like(seconds), np.zeros_like(seconds), np.full(seconds.shape, -1)
        last_on: dict[int, int] = {}
        for index, (needed, pools, after) in enumerate(zip(seconds, self._pools, self._after, strict=True)):
            idle, last_idle = self._latest([last_on[pool] for pool in pools if pool in last_on], ends)
            ready, last = self._latest(after, ends)
            is_late = ready > idle
            start, waits[index] = np.where(is_late, ready, idle), np.where(is_late, last, last_idle)
            end = start + needed
            if self._streams[index] and after:
                first_parts = starts[after] + (ends[after] - starts[after]) / PARTS
                streamed = np.maximum(np.maximum(idle, first_parts.max(axis=0)) + needed, ready + needed / PARTS)
                end = np.where(is_late, streamed, end)
                start = np.where(is_late, end - needed, start)
            starts[index], ends[index] = start, end
            last_on |= dict.fromkeys(pools, index)
        return starts, ends, waits

    @staticmethod
    def _latest(nodes: Sequence[int], ends: FloatArray) -> tuple[FloatArray, IntArray]:
        """Return when the last of some nodes ends in each step, and which that is: the first of several; -1: none."""
        if not nodes:
            return np.zeros(ends.shape[1]), np.full(ends.shape[1], -1)
        ends_of_nodes = ends[nodes]
        return ends_of_nodes.max(axis=0), np.array(nodes)[ends_of_nodes.argmax(axis=0)]
