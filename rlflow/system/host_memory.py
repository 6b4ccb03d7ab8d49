"""The memory of this machine, or of the container that this process runs in."""

import os
from contextlib import suppress
from pathlib import Path

_KIB = 2**10
_CGROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Return the bytes that all processes together may use."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no file without a container, and "max" without a limit
        return min(host_bytes, int((_CGROUP / "memory.max").read_text()))
    return host_bytes


def free_bytes() -> int:
    """Return the bytes that are still available; the page cache counts as available.

    Raises OSError and KeyError on systems other than Linux.
    """
    available = read_amounts("/proc/meminfo")["MemAvailable"]
    with suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(files["inactive_file"]))
    return available


def read_amounts(path: str) -> dict[str, int]:
    """Return the amounts in a file of /proc such as meminfo, in bytes by name."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) == 3 and words[2] == "kB"}
