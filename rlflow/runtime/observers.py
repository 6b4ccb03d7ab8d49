"""Sends the events of a run to all of its observers."""

from collections.abc import Callable, Sequence
from typing import Any

from rlflow.runtime.protocols import Observer


class Observers(Observer):
    """Several observers as one. Each event goes to all, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Add an observer, the last to receive events."""
        self.observers.append(observer)


def _sender(event: str) -> Callable[..., None]:
    def send(self: Observers, *arguments: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*arguments)

    return send


for _event in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Observers, _event, _sender(_event))
