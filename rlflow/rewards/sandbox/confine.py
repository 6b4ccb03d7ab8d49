"""Starts a program with fewer rights and with limits that it cannot raise, and watches it.

A filter refuses system calls by which a program could get memory that no limit counts, reach other processes or
anything outside its namespaces, or attack rarely used parts of the kernel.
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

from rlflow.rewards.sandbox.root import MIB, PROGRAM, TMP, Limits
from rlflow.system.processes import check_result, libc, prctl

# Refused system calls, with their numbers on x86-64 and on aarch64.
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
# Allowed for the process itself only: another process may be the guard.
_PRLIMIT = (302, 261)
_MMAP = (9, 222)
# Shared anonymous memory is not counted for the processes that map it.
_SHARED_ANONYMOUS = 0x21
_SOCKET = (41, 198)
# Unix, IPv4, IPv6, netlink. Other families, such as those between a virtual machine and its host, ignore namespaces.
_FAMILIES = (1, 2, 10, 16)
# AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

# Offsets in struct seccomp_data: the number, the architecture, and the lower halves of two arguments.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40
_LOAD, _AND, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_SET_SECCOMP, _FILTER = 22, 2


_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand. Jumps are relative to the next instruction."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


_NO_NEW_PRIVS = 38
_CLOSE_RANGE, _AT_EXEC = 436, 4
# The user of a program that root runs: the limit on processes does not apply to root.
NOBODY = 65534

_POLL_S = 0.02
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def exec_program(program_input: int, program_output: int, limits: Limits) -> None:
    """Replace this process by the program, confined to ``limits``. Raises OSError."""
    os.setsid()
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # This precedes the limits, because this process may have inherited more open files than they allow.
    os.dup2(program_input, 0)
    os.dup2(program_output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for kind, limit in _rlimits(limits):
        resource.setrlimit(kind, (limit, limit))
    prctl(_NO_NEW_PRIVS, 1)
    install_filter()
    # All other descriptors are closed when the program starts.
    first, last = ctypes.c_uint(3), ctypes.c_uint(-1)
    check_result(libc.syscall(ctypes.c_long(_CLOSE_RANGE), first, last, _AT_EXEC), "close_range")
    _reset_signals()
    # After exec the program has no rights over its namespaces: its user is not root there.
    os.execve(sys.executable, [sys.executable, "-I", PROGRAM], _environment())


def watch_program(
    child: int, limits: Limits, deadline: float
) -> tuple[Literal["exited", "timeout", "memory"], int | None]:
    """Wait for the program; return how it ended and its exit code, or minus the number of its signal.

    Called by process 1 of the namespace with all signals blocked; ``deadline`` is on the monotonic clock.
    """
    while (remaining := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], min(remaining, _POLL_S))
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return "exited", os.waitstatus_to_exitcode(ended[1])
        if _used_memory() > limits.memory_mib * MIB:
            return "memory", None
    return "timeout", None


def _used_memory() -> int:
    """Return the bytes of all processes in the namespace except this one; shared pages count for each process."""
    pages = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != "1":
            try:
                pages += int((process / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
    return pages * _PAGE_BYTES


def _rlimits(limits: Limits) -> Sequence[tuple[int, int]]:
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


def install_filter() -> None:
    """Filter the system calls of this process and of all that it starts. Raises OSError.

    The process must have set ``no_new_privs``.
    """
    instructions = _filter_instructions(platform.machine())
    program = _Program(len(instructions), b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions))
    check_result(libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _filter_instructions(machine: str) -> list[_Instruction]:
    """Return the filter for a kind of machine. Raises OSError when its system calls are not known."""
    if machine not in _ARCHITECTURES:
        raise OSError(f"the sandbox supports {' and '.join(_ARCHITECTURES)}, got {machine}")
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
    own_process = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUALS, 0, 1, 0), allow, deny]
    flags = [(_LOAD, 0, 0, _FOURTH_ARGUMENT), (_AND, 0, 0, _SHARED_ANONYMOUS)]
    not_shared = [*flags, (_EQUALS, 0, 1, _SHARED_ANONYMOUS), deny, allow]
    families = [line for family in _FAMILIES for line in ((_EQUALS, 0, 1, family), allow)]
    known_family = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *families, deny]
    for numbers, then in ((_PRLIMIT, own_process), (_MMAP, not_shared), (_SOCKET, known_family)):
        lines += [(_EQUALS, 0, len(then), numbers[column]), *then]
    return [*lines, allow]
