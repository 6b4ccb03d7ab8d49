"""Linux tools for groups of processes, and the CPUs that they may use."""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

# Options of prctl.
PDEATHSIG, CHILD_SUBREAPER = 1, 36

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, call: str) -> None:
    """Raise OSError if the libc function ``call`` returned an error."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    """Set an option of this process by the system call prctl. Raises OSError."""
    check_result(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process ``parent``, ends.

    Raises SystemExit if the parent has ended already.
    """
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def become_subreaper() -> None:
    """Adopt descendants whose parents end, so that they can be found and killed."""
    prctl(CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process; none if the process does not exist."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this thread has ended, and its children are another one's now
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, parents before their children."""
    pids = children(pid)
    for child in pids:
        pids += children(child)
    return pids


def kill(pid: int) -> None:
    """Kill a process if it exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def limit_memory(more: int) -> None:
    """Let this process allocate at most ``more`` bytes on top of what it has now."""
    # The columns of statm are pages: total, resident, shared, code, unused, data.
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def num_usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, or its container's share if that is smaller."""
    num_cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no file without a container, and "max" without a limit
        quota, period = map(int, _CGROUP_CPU_MAX.read_text().split())
        return max(1, min(num_cpus, quota // period))
    return num_cpus


def num_own_cpus() -> int:
    """Return the usable CPUs, or ``OMP_NUM_THREADS`` if that is fewer: an engine's share of its host, or the user's."""
    share = os.environ.get("OMP_NUM_THREADS", "")
    return min(num_usable_cpus(), int(share)) if share.isdecimal() and int(share) else num_usable_cpus()
