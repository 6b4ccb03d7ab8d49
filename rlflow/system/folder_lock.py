"""A lock that keeps two runs from sharing a folder."""

import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlflow.errors import RecipeError

LOCK_FILE = ".lock"
_IS_LOCKED = {errno.EACCES, errno.EAGAIN}
# Between attempts: is_locked holds the lock for an instant.
_PAUSES_S = (0.01, 0.05)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it until the context ends. Raises RecipeError while another run has it locked.

    The kernel holds the lock (``flock``; on NFS the server does) and releases it when the process ends, however it
    ends. The lock file alone locks nothing, so a file left by a killed run does no harm. If nothing was written to a
    new folder, it is removed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir(folder))
    handle = _acquire(folder)
    try:
        yield
    finally:
        if set(os.listdir(folder)) == {*before, LOCK_FILE}:
            (folder / LOCK_FILE).unlink()
        # Closing is not enough: processes that were forked in between hold the same lock.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def _acquire(folder: Path) -> int:
    """Return the handle of the locked file."""
    while True:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle, folder)
            # Another run may have removed the file before it released the lock.
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    for pause in _PAUSES_S:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(pause)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _IS_LOCKED:
            raise
        holder = os.read(handle, 200).decode(errors="replace")
        raise RecipeError(
            "hydra.run.dir",
            f"'{folder}' is in use by another run" + (f", {holder}" if holder else ""),
            fix="wait until that run ends; a new run can use another folder (hydra.run.dir=FOLDER)",
        ) from None
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())


def is_locked(folder: Path) -> bool | None:
    """Return whether a process has locked the folder of a run; None for a folder without a lock.

    The kernel releases the lock when the process ends, however it ends.
    """
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return None
