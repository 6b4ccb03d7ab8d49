"""Folders that are complete or do not exist, whenever this process is killed.

A folder is written under another name, flushed to disk, and renamed.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import EngineError, StorageError, first_line, storage_error

# The names that ``unfinished`` and ``remove_folder`` give.
_TEMPORARY = re.compile(r"\.(.+)-[a-z0-9_]{8}")
_HALF_DELETED = re.compile(r"\.step-\d{6,}-removed")
_BEFORE = "before"


def write_folder(folder: Path, write: Callable[[Path], object], *, replaces: bool = False) -> None:
    """Call ``write`` with a new folder, and rename that to ``folder`` when all of it is on disk.

    If ``folder`` exists by then, because another process did the same work, it stays unless this call ``replaces`` it.
    """
    with storage_errors(folder), unfinished(folder) as temporary:
        write(temporary)
        complete_folder(temporary, folder, replaces=replaces)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Create a folder to be renamed to ``folder``, beside it, and delete what is left there at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # No TemporaryDirectory: it deletes the folder when this process exits, while a thread may still complete it.
    parent = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary = parent / folder.name
        temporary.mkdir()
        yield temporary
    finally:
        _delete(parent)


def complete_folder(temporary: Path, folder: Path, *, replaces: bool = False) -> None:
    """Flush a folder to disk, and give it its name."""
    for path in [*temporary.rglob("*"), temporary]:
        if path.is_file():  # safetensors makes files that only their owner may read
            path.chmod(temporary.stat().st_mode & 0o666)
        _flush(path)
    if replaces and folder.exists():
        folder.rename(temporary.with_name(_BEFORE))
    if not folder.exists():
        temporary.rename(folder)
        _flush(folder.parent)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raise StorageError for the errors that Python, torch and safetensors raise when a disk is full."""
    # Imported late: a dry run looks for checkpoints, and needs no training library.
    from safetensors import SafetensorError

    try:
        yield
    except EngineError:
        raise
    except OSError as error:
        raise storage_error(error, folder) from error
    except (RuntimeError, SafetensorError) as error:
        raise StorageError(
            f"{folder}: cannot be written ({first_line(error)}).\n  Fix: free some space on that disk."
        ) from error


def remove_folder(folder: Path) -> None:
    """Delete a folder. It loses its name first, because a kill while files are deleted must leave no part of it."""
    nameless = folder.with_name(f".{folder.name}-removed")
    folder.rename(nameless)
    shutil.rmtree(nameless)


def remove_unfinished(parent: Path) -> None:
    """Delete the unfinished and half-deleted folders that a killed process has left in ``parent``, and nothing else."""
    for folder in parent.glob(".*-*"):
        if not folder.is_symlink() and folder.is_dir() and _is_unfinished(folder):
            _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a folder as far as that is possible: a rank of a run that has failed may still write there.

    What is left is deleted when the run starts again.
    """
    shutil.rmtree(folder, ignore_errors=True)


def _is_unfinished(folder: Path) -> bool:
    """Return whether the name and the content of a folder are those of an unfinished or half-deleted one."""
    if _HALF_DELETED.fullmatch(folder.name):
        return True
    name = _TEMPORARY.fullmatch(folder.name)
    return name is not None and {each.name for each in folder.iterdir()} <= {name[1], _BEFORE}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
