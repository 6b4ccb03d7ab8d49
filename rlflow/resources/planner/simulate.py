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
        self.nodes = [task.node for task in workload.tasks] + [sync.node for sync in workload.copies]
        self._pools: list[tuple[int, ...]] = [
            (pool_of[task.role],) if task.role is not None else () for task in workload.tasks
        ]
        # Outputs of tasks that run ahead are there when their step begins, so only such tasks wait for each other.
        takes_turns = workload.takes_turns({role: (pool,) for role, pool in pool_of.items()})
        ahead = workload.ahead.nodes if workload.ahead and not takes_turns else ()
        after = [[node for node in task.after if task.node in ahead or node not in ahead] for task in workload.tasks]
        for sync in workload.copies:
            self._pools.append(tuple(sorted({pool_of[sync.source], pool_of[sync.target]})))
            after.append([task.node for task in workload.tasks if task.role == sync.source and task.kind == "update"])
        self._after = [[self.nodes.index(node) for node in nodes] for nodes in after]
        self._streams = [task.streams for task in workload.tasks] + [False] * len(workload.copies)
        self._num_pools = len(set(pool_of.values()))

    def schedule(self, seconds: Mapping[str, float]) -> Schedule:
        """Return the schedule of a step; ``seconds`` has every node and weight sync."""
        times = self._times(np.array([[seconds[node]] for node in self.nodes]))
        spans = [
            TaskSpan(
                node=node,
                start=float(start[0]),
                end=float(end[0]),
                pools=pools,
                waits_for=None if waits[0] < 0 else self.nodes[waits[0]],
            )
            for node, pools, (start, end, waits) in zip(self.nodes, self._pools, times, strict=True)
        ]
        return Schedule(tuple(spans), self._num_pools)

    def step_seconds(self, seconds: FloatArray) -> FloatArray:
        """Return the lengths of many steps [S]; ``seconds`` has a row for each node and weight sync [N, S]."""
        ends = [end for _, end, _ in self._times(seconds)]
        return np.max(ends, axis=0) if ends else np.zeros(seconds.shape[1])

    def _times(self, seconds: FloatArray) -> list[tuple[FloatArray, FloatArray, IntArray]]:
        """Return the start and the end of each node in each step, and the node whose end is its start, or -1."""
        times: list[tuple[FloatArray, FloatArray, IntArray]] = []
        last_on: dict[int, int] = {}
        for index, (needed, pools, after) in enumerate(zip(seconds, self._pools, self._after, strict=True)):
            idle, waits = self._latest([last_on[pool] for pool in pools if pool in last_on], times, needed)
            ready, last = self._latest(after, times, needed)
            is_late = ready > idle
            start, waits = np.where(is_late, ready, idle), np.where(is_late, last, waits)
            end = start + needed
            if self._streams[index] and after:
                first_parts = [times[node][0] + (times[node][1] - times[node][0]) / PARTS for node in after]
                streamed = np.maximum(np.maximum(idle, np.max(first_parts, axis=0)) + needed, ready + needed / PARTS)
                end = np.where(is_late, streamed, end)
                start = np.where(is_late, end - needed, start)
            times.append((start, end, waits))
            last_on |= dict.fromkeys(pools, index)
        return times

    @staticmethod
    def _latest(
        nodes: Sequence[int], times: Sequence[tuple[FloatArray, FloatArray, IntArray]], like: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """Return when the last of some nodes ends in each step, and which that is: the first of several; -1: none."""
        latest, last = np.zeros_like(like), np.full(like.shape, -1)
        for node in nodes:
            is_later = (times[node][1] > latest) | (last < 0)
            latest, last = np.where(is_later, times[node][1], latest), np.where(is_later, node, last)
        return latest, last
