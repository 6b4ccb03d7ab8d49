"""Signals to a run: Ray does not take their handler, and those to the run's process group do not end Ray."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


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


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Have Ray start its processes in process groups of their own, apart from the group of this process.

    A SIGTERM to the group of the run, as ``timeout`` sends it, then does not end Ray before the run's last step. On
    Linux the kernel kills them when this process ends. Elsewhere Ray kills them by their group, so they stay in it.
    """
    from ray._private import services

    ray_services: Any = services
    popen = ray_services.ConsolePopen
    if sys.platform == "linux":
        ray_services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        ray_services.ConsolePopen = popen
