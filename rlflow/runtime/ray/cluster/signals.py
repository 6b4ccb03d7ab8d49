"""Signals to a run: Ray does not take their handler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keeping_signal_handler() -> Iterator[Callable[[], None]]:
    """Keep this process's handler of SIGTERM, which Ray replaces when it starts.

    The function that it yields restores the process's own handler at once, since a run has one for stopping with a
    checkpoint. Without an own handler Ray's stays until the exit, and ends Ray with the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM)

    def restore_handler() -> None:
        if before not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, before)

    try:
        yield restore_handler
    finally:
        signal.signal(signal.SIGTERM, before)
