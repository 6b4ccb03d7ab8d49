"""From the guard's child to the program: with fewer rights, and limits that it cannot raise."""

import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence

from rlflow.rewards.processes import checked, libc, prctl
from rlflow.rewards.sandbox.limits import MIB, Limits
from rlflow.rewards.sandbox.root import PROGRAM, TMP
from rlflow.rewards.sandbox.syscalls import refuse

_NO_NEW_PRIVS = 38
_CLOSE_RANGE, _AT_EXEC = 436, 4
# Inside; whoever runs as root becomes it, since limits on processes do not hold for root.
NOBODY = 65534


def become(program_input: int, program_output: int, limits: Limits) -> None:
    """Runs the program in this process. Raises OSError when that cannot be."""
    os.setsid()
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # Before the limits: the parent may have more files open than the program may.
    os.dup2(program_input, 0)
    os.dup2(program_output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for kind, limit in _limits(limits):
        resource.setrlimit(kind, (limit, limit))
    prctl(_NO_NEW_PRIVS, 1)
    refuse()
    # Whatever else is open in this process is closed as the program starts.
    everything, from_standard = ctypes.c_uint(-1), ctypes.c_uint(3)
    checked(libc.syscall(ctypes.c_long(_CLOSE_RANGE), from_standard, everything, _AT_EXEC), "close_range")
    _reset_signals()
    # A process that execs has no rights over its namespaces any more: its user is not root there.
    os.execve(sys.executable, [sys.executable, "-I", PROGRAM], _environment())


def _limits(limits: Limits) -> Sequence[tuple[int, int]]:
    return (
        (resource.RLIMIT_AS, limits.memory_mib * MIB),
        (resource.RLIMIT_CPU, math.ceil(limits.timeout_s) + 1),
        (resource.RLIMIT_FSIZE, limits.file_mib * MIB),
        (resource.RLIMIT_NPROC, limits.num_processes),
        (resource.RLIMIT_NOFILE, limits.num_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    )


def _environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"HOME": TMP, "TMPDIR": TMP, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **one_thread}


def _reset_signals() -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
