"""System calls that a program in the sandbox is refused: by them it could have memory that no limit counts, reach other
processes or what lies outside of its namespaces, or try old weaknesses of the kernel."""

import ctypes
import errno
import platform
import struct

from rlflow.rewards.processes import checked, libc

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
