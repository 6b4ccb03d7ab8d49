"""Sends the events of a run to all of its observers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.compiler.plan import Plan
from rlflow.runtime.protocols import Observer, Report, Sample


class Observers(Observer):
    """Several observers as one. Each event goes to all, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Add an observer, the last to receive events."""
        self.observers.append(observer)

    def warned(self, warning: str) -> None:
        for each in self.observers:
            each.warned(warning)

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        for each in self.observers:
            each.started(plan, directory, step)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self.observers:
            each.measured(step, metrics)

    def evaluated(self, step: int, figure: float) -> None:
        for each in self.observers:
            each.evaluated(step, figure)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self.observers:
            each.stepped(step, metrics)

    def failed(self, step: int, node: str, reasons: Mapping[str, int]) -> None:
        for each in self.observers:
            each.failed(step, node, reasons)

    def sampled(self, samples: Sequence[Sample]) -> None:
        for each in self.observers:
            each.sampled(samples)

    def ended(self, report: Report) -> None:
        for each in self.observers:
            each.ended(report)

    def close(self) -> None:
        for each in self.observers:
            each.close()
