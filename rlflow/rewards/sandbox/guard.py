"""Watching a program from inside its namespaces."""

import os
import signal
import time
from pathlib import Path
from typing import Literal

from rlflow.rewards.sandbox.limits import MIB, Limits

_LOOK_S = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")


def watched(child: int, limits: Limits, deadline: float) -> tuple[Literal["exited", "timeout", "memory"], int | None]:
    """How the program ends, and its exit code, or a signal's number below zero. Called by process 1 of the namespace,
    with all signals blocked; ``deadline`` is on the monotonic clock."""
    while (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], min(left, _LOOK_S))
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return "exited", os.waitstatus_to_exitcode(ended[1])
        if _memory() > limits.memory_mib * MIB:
            return "memory", None
    return "timeout", None


def _memory() -> int:
    """Bytes of all processes but this one; what they share counts for each."""
    pages = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != "1":
            try:
                pages += int((process / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
    return pages * _PAGE
