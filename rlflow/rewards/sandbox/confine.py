"""System calls that a program in the sandbox is refused: by them it could have memory that no limit counts, reach other
processes or what lies outside of its namespaces, or try old weaknesses of the kernel.

From the guard's child to the program: with fewer rights, and limits that it cannot raise.

Watching a program from inside its namespaces.
"""

import ctypes
import errno
import math
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rlflow.rewards.processes import checked, libc, prctl
from rlflow.rewards.sandbox.root import MIB, PROGRAM, TMP, Limits

# For x86-64 and for aarch64.
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "unshare": (272, 97),
    "setns": (308, 268),
}
# The limits of another process, which may be the guard.
_PRLIMIT = (302, 261)
_MMAP = (9, 222)
# Memory that is shared and of no file is not seen in the processes that hold it.
_SHARED_ANONYMOUS = 0x21
_SOCKET = (41, 198)
# Others, as those between a virtual machine and its host, know no namespaces: Unix, IPv4, IPv6, netlink.
_FAMILIES = (1, 2, 10, 16)
# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

# Of struct seccomp_data: where the number, the architecture and the lower halves of arguments are.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40
_LOAD, _AND, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_SET_SECCOMP, _FILTER = 22, 2


_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand. Jumps count from the next instruction."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse() -> None:
    """From now on, for this process and all that it starts; it has given up new privileges. Raises OSError."""
    instructions = _instructions(platform.machine())
    program = _Program(len(instructions), b"".join(struct.pack("<HBBI", *each) for each in instructions))
    checked(libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _instructions(machine: str) -> list[_Instruction]:
    """Raises OSError."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"the sandbox does not know the system calls of {machine}, but of {', '.join(_ARCHITECTURES)}")
    column, architecture = _ARCHITECTURES[machine]
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for code, number in [(_AT_LEAST, _X32), *((_EQUALS, numbers[column]) for numbers in _REFUSED.values())]:
        lines += [(code, 0, 1, number), deny]
    of_itself = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUALS, 0, 1, 0), allow, deny]
    flags = [(_LOAD, 0, 0, _FOURTH_ARGUMENT), (_AND, 0, 0, _SHARED_ANONYMOUS)]
    unshared = [*flags, (_EQUALS, 0, 1, _SHARED_ANONYMOUS), deny, allow]
    families = [line for family in _FAMILIES for line in ((_EQUALS, 0, 1, family), allow)]
    known = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *families, deny]
    for numbers, then in ((_PRLIMIT, of_itself), (_MMAP, unshared), (_SOCKET, known)):
        lines += [(_EQUALS, 0, len(then), numbers[column]), *then]
    return [*lines, allow]


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
