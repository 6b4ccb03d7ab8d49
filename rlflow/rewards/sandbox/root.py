"""The limits and the file system of a program in the sandbox.

The program sees Python and the system's libraries, read-only, and an empty /tmp that it can write to.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlflow.system.processes import check_result, libc

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources that a program may use."""

    timeout_s: float
    memory_mib: int = 1024
    """The address space of each process, and the memory of all processes together."""
    num_processes: int = 32
    """Processes at a time. Threads count as processes."""
    file_mib: int = 16
    """The size of each file, and of the output."""
    disk_mib: int = 64
    """The size of all files together."""
    num_files: int = 64
    """Files that a process may have open. Four times as many may exist."""


PROGRAM = "/program.py"
TMP = "/tmp"

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
# The new root is built on this folder: every system has it, and the program needs nothing in it.
_STAGE = Path("/sys")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
# /dev/zero is left out: mapping it gives shared memory, which the guard does not see.
_DEVICES = ("null", "full", "random", "urandom")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def build_root(program: str, limits: Limits) -> None:
    """Build the file system and make it this process's root. Raises OSError.

    The process must be alone in its mount and PID namespaces.
    """
    _mount("none", "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", str(_STAGE), "tmpfs", _NOSUID | _NODEV, "size=4m,nr_inodes=10000,mode=755")
    _make_folder(_inside(TMP))
    size = f"size={limits.disk_mib * MIB},nr_inodes={4 * limits.num_files},mode=1777"
    _mount("tmpfs", str(_inside(TMP)), "tmpfs", _NOSUID | _NODEV, size)
    _make_folder(_inside("/proc"))
    _mount("proc", str(_inside("/proc")), "proc", _NOSUID | _NODEV | _NOEXEC)
    for path in visible_paths():
        _expose(path)
    for name in _DEVICES:
        _expose(f"/dev/{name}")
    (_STAGE / "dev/shm").symlink_to(TMP)
    _inside(PROGRAM).write_text(program, "utf-8", "surrogatepass")
    os.chdir(_STAGE)
    check_result(libc.pivot_root(b".", b"."), "pivot_root")
    check_result(libc.umount2(b".", _DETACH), "umount")
    _mount("none", "/", flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    # The program would be root in a user namespace of its own.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.chdir(TMP)


def visible_paths() -> list[str]:
    """Return the paths of the system and of this Python that the program can read, none inside another.

    Raises OSError when the home folder is inside one of them.
    """
    paths: list[str] = []
    # A virtual environment may name its Python by a path that contains links.
    for path in (*_SYSTEM, os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix):
        if os.path.lexists(path) and not any(Path(path).is_relative_to(other) for other in paths):
            paths.append(path)
    home = os.path.realpath(Path.home())
    if any(Path(home).is_relative_to(path) for path in paths):
        raise OSError(f"the home folder '{home}' is inside a folder of Python or of the system")
    return paths


def _expose(path: str) -> None:
    """Mount a path of the host at the same place in the new root, read-only."""
    target = _inside(path)
    if os.path.islink(path):
        _make_folder(target.parent)
        target.symlink_to(os.readlink(path))
        return
    if os.path.isdir(path):
        _make_folder(target)
    else:
        _make_folder(target.parent)
        target.touch()
    _mount(path, str(target), flags=_BIND | _REC)
    if not path.startswith("/dev/"):
        _make_read_only(str(target))


def _make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only. Needs Linux 5.12."""
    attributes = _MountAttributes(attr_set=_RDONLY | _NOSUID | _NODEV)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), size)
    check_result(libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check_result(libc.mount(*arguments), f"mount {target}")


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _inside(path: str) -> Path:
    return _STAGE / path.lstrip("/")
