"""Signals between a run and the Ray that it starts: neither takes those that are for the other."""

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
    """Start Ray's processes inside in process groups of their own.

    A SIGTERM to the group of the run, as ``timeout`` sends it, then does not end Ray before the run's last step. On
    Linux the kernel kills these processes when the run ends; elsewhere Ray finds them by the group, which is kept.
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
