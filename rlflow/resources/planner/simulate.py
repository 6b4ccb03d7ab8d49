"""The schedule of a step: when each task runs, by list scheduling of the graph over pools of GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.resources.workload import Workload

# A streaming task works on parts; its last part waits for the last of its input.
PARTS = 8


@dataclass(frozen=True, kw_only=True)
class Span:
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

    spans: tuple[Span, ...]
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


def simulate(workload: Workload, seconds: Mapping[str, float], pool_of: Mapping[str, int]) -> Schedule:
    """Schedule a step. A pool does one task at a time, in order.

    ``seconds`` has every node and weight sync, ``pool_of`` the pool of each role.
    """
    spans: dict[str, Span] = {}
    free: dict[int, tuple[float, str | None]] = {}

    def run(node: str, pools: Sequence[int], after: Sequence[str], *, streams: bool) -> None:
        ready = max(((spans[name].end, name) for name in after), default=(0.0, None))
        idle = max((free.get(pool, (0.0, None)) for pool in pools), default=(0.0, None), key=lambda at: at[0])
        needed = seconds[node]
        start, waits_for = max(idle, ready, key=lambda at: at[0])
        end = start + needed
        if streams and ready[1] is not None and ready[0] > idle[0]:
            source = spans[ready[1]]
            first_part = source.start + source.seconds / PARTS
            begin = max(idle[0], first_part)
            end = max(begin + needed, ready[0] + needed / PARTS)
            start, waits_for = end - needed, ready[1]
        spans[node] = Span(node=node, start=start, end=end, pools=tuple(pools), waits_for=waits_for)
        for pool in pools:
            free[pool] = (end, node)

    for task in workload.tasks:
        pools = [pool_of[task.role]] if task.role is not None else []
        run(task.node, pools, task.after, streams=task.streams)
    for sync in workload.copies:
        updates = [task.node for task in workload.tasks if task.role == sync.source and task.kind == "update"]
        run(sync.node, sorted({pool_of[sync.source], pool_of[sync.target]}), updates, streams=False)
    return Schedule(tuple(spans.values()), len(set(pool_of.values())))
