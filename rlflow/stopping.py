"""Stopping a run from outside: the first signal ends it after the step, with a checkpoint; the second at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

# A terminal sends the first; Slurm, Kubernetes and `kill` send the second.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(announce: Callable[[], object]) -> Iterator[Event]:
    """Give an event that the first SIGINT or SIGTERM sets, after a call of ``announce``.

    The second one raises KeyboardInterrupt.
    """
    stopping = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        announce()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
