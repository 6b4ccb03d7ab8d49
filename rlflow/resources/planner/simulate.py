"""The schedule of a step: when each task runs, by list scheduling of the graph over pools of GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.resources.workload import Workload

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
        after = [
            (tuple(node for node in task.after if task.node in ahead or node not in ahead), task.streams)
            for task in workload.tasks
        ]
        for sync in workload.copies:
            self._pools.append(tuple(sorted({pool_of[sync.source], pool_of[sync.target]})))
            updates = [task for task in workload.tasks if task.role == sync.source and task.kind == "update"]
            after.append((tuple(task.node for task in updates), False))
        place = {node: index for index, node in enumerate(self.nodes)}
        self._order = [
            (node, pools, tuple(place[name] for name in names), streams)
            for node, pools, (names, streams) in zip(self.nodes, self._pools, after, strict=True)
        ]
        self._num_pools = len(set(pool_of.values()))

    def schedule(self, seconds: Mapping[str, float]) -> Schedule:
        """Return the schedule of a step; ``seconds`` has every node and weight sync."""
        spans = [
            TaskSpan(
                node=node, start=start, end=end, pools=pools, waits_for=None if waits is None else self.nodes[waits]
            )
            for node, pools, (start, end, waits) in zip(self.nodes, self._pools, self._times(seconds), strict=True)
        ]
        return Schedule(tuple(spans), self._num_pools)

    def step_seconds(self, seconds: Mapping[str, float]) -> float:
        """Return the length of the step alone. It never falls where the time of a node grows."""
        return max((end for _, end, _ in self._times(seconds)), default=0.0)

    def _times(self, seconds: Mapping[str, float]) -> list[tuple[float, float, int | None]]:
        """Return the start and the end of each node, and the node whose end is its start."""
        times: list[tuple[float, float, int | None]] = []
        free: dict[int, tuple[float, int]] = {}
        for index, (node, pools, after, streams) in enumerate(self._order):
            needed, idle, waits = seconds[node], 0.0, None
            for pool in pools:
                if pool in free and (waits is None or free[pool][0] > idle):
                    idle, waits = free[pool]
            ready, last = 0.0, None
            for before in after:
                if last is None or times[before][1] > ready:
                    ready, last = times[before][1], before
            start, end = idle, idle + needed
            if last is not None and ready > idle:
                start, end, waits = ready, ready + needed, last
                if streams:
                    first_part = max(times[at][0] + (times[at][1] - times[at][0]) / PARTS for at in after)
                    end = max(max(idle, first_part) + needed, ready + needed / PARTS)
                    start = end - needed
            times.append((start, end, waits))
            for pool in pools:
                free[pool] = (end, index)
        return times


def simulate(workload: Workload, seconds: Mapping[str, float], pool_of: Mapping[str, int]) -> Schedule:
    """Schedule a step: ``seconds`` has every node and weight sync, ``pool_of`` the pool of each role."""
    return StepScheduler(workload, pool_of).schedule(seconds)
