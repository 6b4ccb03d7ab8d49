"""Warns about a run in which nothing is learned, although no step fails."""

from collections.abc import Iterator, Mapping

from rlflow.compiler.graph import Graph
from rlflow.nodes.alarms import Alarm

_STEPS = 5
"""Steps in a row after which a value is no accident."""


class Alarms:
    """The alarms of all nodes of a graph. Each one is reported once in a run."""

    def __init__(self, graph: Graph) -> None:
        self._alarms = {(node.name, alarm): 0 for node in graph.nodes for alarm in node.operation.alarms}
        """The number of steps in a row in which each alarm was raised."""
        self._reported: set[tuple[str, Alarm]] = set()

    def warnings(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield a warning for each alarm that has been raised in several steps up to this one."""
        for key, times in self._alarms.items():
            node, alarm = key
            value = metrics.get(f"{node}/{alarm.metric}")
            if value is None:
                continue
            self._alarms[key] = times + 1 if alarm.is_raised(value) else 0
            if self._alarms[key] == _STEPS and key not in self._reported:
                self._reported.add(key)
                yield f"step {step}: {node}/{alarm.metric} is {value:.3g}, after {_STEPS} such steps: {alarm.fact}"
