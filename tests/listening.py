"""The sockets on which processes of this machine listen, from the kernel's tables."""

import os
from contextlib import suppress
from pathlib import Path

# The addresses 127.0.0.1, ::1 and ::ffff:127.0.0.1 in the kernel's form.
LOOPBACK = {"0100007F", f"{0:024}01000000", f"{0:016}FFFF00000100007F"}
LISTENS = "0A"


def descendants(root: int) -> set[int]:
    """Return the process ``root`` and all processes below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(processes: set[int]) -> list[tuple[str, str]]:
    """Return the name of the process and the address, as the kernel writes it, of each socket that listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    sockets = {f"socket:[{fields[9]}]": fields[1] for fields in lines if fields[3] == LISTENS}
    found = []
    for pid in processes:
        with suppress(OSError):  # it has ended
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            open_files = map(_target, Path(f"/proc/{pid}/fd").iterdir())
            found += [(name, sockets[file]) for file in open_files if file in sockets]
    return found


def _target(link: Path) -> str:
    """Return where the link points; an empty text for a file that was closed meanwhile, as the listing itself is."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
