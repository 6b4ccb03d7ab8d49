"""What Linux offers to hold processes together.

Pickled messages over a stream socket, each behind its length.
"""

import ctypes
import os
import pickle
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

# Options of prctl.
PDEATHSIG, CHILD_SUBREAPER = 1, 36

_CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raises OSError for a call of libc that has failed."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    checked(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent, of that process id, ends. Raises SystemExit if it has already."""
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def become_subreaper() -> None:
    """What descendants leave behind becomes a child of this process, and so can be found."""
    prctl(CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Of all threads of a process; none of one that is not there."""
    with suppress(OSError):
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """The nearest first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def kill(pid: int) -> None:
    """If it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processors() -> int:
    """How many this process may use: those that it may run on, or the share of them that its container has."""
    here = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no file without a container, and "max" without a limit
        quota, period = map(int, _CPU_SHARE.read_text().split())
        return max(1, min(here, quota // period))
    return here


_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


class Channel:
    """One end. Messages come from our own processes alone: what is unpickled is trusted."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        """Raises OSError when the other end has gone, or does not read within the socket's timeout."""
        self.socket.sendall(_LENGTH.pack(len(message)) + message)

    def messages(self) -> list[Any] | None:
        """Those that are whole, after waiting for bytes; None when the other end has gone. Raises TimeoutError."""
        try:
            new = self.socket.recv(_CHUNK)
        except ConnectionResetError:
            new = b""
        if not new:
            return None
        self._received += new
        whole = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            whole.append(pickle.loads(memoryview(self._received)[_LENGTH.size : end].tobytes()))
            del self._received[:end]
        return whole
