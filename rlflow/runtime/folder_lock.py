"""A lock that keeps two runs out of one folder."""

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlflow.errors import RecipeError

LOCK_FILE = ".lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep every other run out of it until the block ends.

    The kernel holds the lock (``flock``; on NFS the server does) and gives it back when the process ends, however it
    ends. The file alone locks nothing, so one that a killed run left is no obstacle. A block that writes nothing leaves
    nothing.

    Raises RecipeError while another run has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir(folder))
    handle = _acquire(folder)
    try:
        yield
    finally:
        if set(os.listdir(folder)) == {*before, LOCK_FILE}:
            (folder / LOCK_FILE).unlink()
        # Closing is not enough: processes that were forked meanwhile hold the same lock.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
        with suppress(OSError):  # other files are in it
            folder.rmdir()


def _acquire(folder: Path) -> int:
    while True:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle, folder)
            # The run that had it may have removed the file before it let go.
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        holder = os.read(handle, 200).decode(errors="replace")
        raise RecipeError(
            "hydra.run.dir",
            f"'{folder}' is in use by another run" + (f", {holder}" if holder else ""),
            fix="wait until that ends, or give this one a folder of its own: hydra.run.dir=FOLDER",
        ) from None
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
