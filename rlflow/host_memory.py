"""The memory of this machine, or as much of it as the container may use."""

import os
from contextlib import suppress
from pathlib import Path

_KIB = 2**10
_GROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Of all processes."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no file without a container, and "max" without a limit
        return min(here, int((_GROUP / "memory.max").read_text()))
    return here


def free_bytes() -> int:
    """That processes can have yet; files that were read do not count. Raises OSError and KeyError elsewhere than on
    Linux."""
    here = figures("/proc/meminfo")["MemAvailable"]
    with suppress(OSError, ValueError):
        limit, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return min(here, limit - used + int(files["inactive_file"]))
    return here


def figures(path: str) -> dict[str, int]:
    """Of a file in /proc: bytes by name."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) == 3 and words[2] == "kB"}
