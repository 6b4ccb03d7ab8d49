"""What a program in the sandbox may use.

The file system that a program sees: Python and the system's libraries, to read; and an empty /tmp.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlflow.rewards.processes import checked, libc

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    timeout_s: float
    memory_mib: int = 1024
    """Of address space, for each process, and of memory, for all of them together."""
    num_processes: int = 32
    """Threads count as processes."""
    file_mib: int = 16
    """Of each file, and so of the output."""
    disk_mib: int = 64
    """Of all files together."""
    num_files: int = 64
    """That one process has open; and a fourth of those that there may be."""


PROGRAM = "/program.py"
TMP = "/tmp"

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
# Where it is built: every system has this folder, and nothing of it is needed.
_STAGE = Path("/sys")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
# Not zero: what is mapped of it is shared memory, which the guard does not see.
_DEVICES = ("null", "full", "random", "urandom")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def build(program: str, limits: Limits) -> None:
    """Makes it the root of this process, which is alone in its mount and PID namespaces. Raises OSError."""
    _mount("none", "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", str(_STAGE), "tmpfs", _NOSUID | _NODEV, "size=4m,nr_inodes=10000,mode=755")
    _make(_inside(TMP))
    size = f"size={limits.disk_mib * MIB},nr_inodes={4 * limits.num_files},mode=1777"
    _mount("tmpfs", str(_inside(TMP)), "tmpfs", _NOSUID | _NODEV, size)
    _make(_inside("/proc"))
    _mount("proc", str(_inside("/proc")), "proc", _NOSUID | _NODEV | _NOEXEC)
    for path in visible():
        _show(path)
    for name in _DEVICES:
        _show(f"/dev/{name}")
    (_STAGE / "dev/shm").symlink_to(TMP)
    _inside(PROGRAM).write_text(program, "utf-8", "surrogatepass")
    os.chdir(_STAGE)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", _DETACH), "umount")
    _mount("none", "/", flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    # What the program may not have either: a namespace in which it would be root.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.chdir(TMP)


def visible() -> list[str]:
    """Folders of the system and of this Python, none inside another. Raises OSError when the home folder is in one."""
    found: list[str] = []
    # A virtual environment names its Python by a path that may hold links.
    for path in (*_SYSTEM, os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix):
        if os.path.lexists(path) and not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    home = os.path.realpath(Path.home())
    if any(Path(home).is_relative_to(path) for path in found):
        raise OSError(f"the home folder '{home}' is inside one of Python or of the system")
    return found


def _show(path: str) -> None:
    """At the same place, to read alone."""
    target = _inside(path)
    if os.path.islink(path):
        _make(target.parent)
        target.symlink_to(os.readlink(path))
        return
    if os.path.isdir(path):
        _make(target)
    else:
        _make(target.parent)
        target.touch()
    _mount(path, str(target), flags=_BIND | _REC)
    if not path.startswith("/dev/"):
        _read_only(str(target))


def _read_only(target: str) -> None:
    """With all that is mounted below it; needs Linux 5.12."""
    attributes = _MountAttributes(attr_set=_RDONLY | _NOSUID | _NODEV)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), size)
    checked(libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    checked(libc.mount(*arguments), f"mount {target}")


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _inside(path: str) -> Path:
    return _STAGE / path.lstrip("/")
