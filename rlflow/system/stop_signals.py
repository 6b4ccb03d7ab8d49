"""Ctrl-C and SIGTERM, which ask a run to stop after its step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Ctrl-C sends SIGINT; Slurm, Kubernetes and `kill` send SIGTERM.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = tuple(128 + number for number in _SIGNALS)
"""The exit codes of a run that a signal has stopped, as shells give them: 130 and 143."""


@dataclass
class StopRequest:
    """The request of a signal that the run stops after its step."""

    exit_code: int = 0
    """The exit code for that signal; 0 before one arrives."""

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return self.exit_code != 0


@contextmanager
def stop_on_signals(announce: Callable[[], object]) -> Iterator[StopRequest]:
    """Yield a request that the first SIGINT or SIGTERM sets; a SIGINT after it raises KeyboardInterrupt.

    A SIGTERM after it changes nothing, because ``timeout`` sends it to the process and to its group. ``announce`` is
    called after the first signal. A KeyboardInterrupt has the exit code as its argument.
    """
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        stop.exit_code = 128 + number
        announce()

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    except KeyboardInterrupt:
        raise KeyboardInterrupt(stop.exit_code or STOPPED[0]) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
