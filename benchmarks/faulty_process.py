"""A run in a forked process that is killed, or whose disk is full, at a given moment or file operation."""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOSPC
from itertools import count
from pathlib import Path
from select import select
from typing import Any, Literal

from rlflow.errors import EngineError, UserError

FINISHED, TYPED, UNTYPED = 0, 3, 4
"""The exit codes of a run that ended, of one with an error of rlflow or of the disk, and of one with another error."""
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}


@dataclass(frozen=True)
class Fault:
    """A disturbance of a run."""

    kind: Literal["none", "moment", "operation", "full disk", "file size"] = "none"
    at: float = 0
    """The seconds of a moment, the number of a file operation in the run's folder, or the largest size of a file."""
    delay: float | None = None
    """The seconds between the operation and the kill; None for a kill before the operation."""


def run_with(fault: Fault, work: Callable[[], object], folder: Path, log: Path | None = None) -> int | None:
    """Call ``work``, a run in ``folder``, in a forked process; return its exit code, or None if it was killed.

    The numbers of the file operations on checkpoints, models and the journal are written to ``log``.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os._exit(_child(work, folder, fault, writer, log))
    os.close(writer)
    end = os.pidfd_open(process)
    try:
        seconds = fault.at if fault.kind == "moment" else fault.delay
        is_due = fault.kind == "moment" or (seconds is not None and os.read(reader, 1))
        if is_due and not select([end], [], [], seconds)[0]:
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        os.close(end)
        os.close(reader)
    return None if status == -signal.SIGKILL else status


def _child(work: Callable[[], object], folder: Path, fault: Fault, writer: int, log: Path | None) -> int:
    operations: list[int] = []
    numbers = count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS or not _is_below(arguments[0], folder, event):
            return
        number = next(numbers)
        if log is not None and any(f"/{part}/" in str(arguments[0]) for part in ("checkpoints", "model", "journal")):
            operations.append(number)
        if fault.kind == "operation" and number == fault.at:
            if fault.delay is None:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writer, b".")
        if fault.kind == "full disk" and number >= fault.at and _takes_space(event, arguments):
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(arguments[0]))

    try:
        if fault.kind == "file size":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(fault.at), resource.RLIM_INFINITY))
        sys.addaudithook(hook)
        work()
        if log is not None:
            log.write_text(json.dumps(operations))
    except (UserError, EngineError) as error:
        if fault.kind not in ("full disk", "file size"):
            print(f"{folder.name} ends: {error}", flush=True)
        return TYPED
    except BaseException:
        traceback.print_exc()
        return UNTYPED
    return FINISHED


def _is_below(path: Any, folder: Path, event: str) -> bool:
    """Return whether a path is in the folder. A tree is removed by names relative to its folders."""
    if not isinstance(path, str | Path):
        return False
    return str(path).startswith(f"{folder}/") or (event in ("os.remove", "os.rmdir") and not os.path.isabs(path))


def _takes_space(event: str, arguments: tuple[Any, ...]) -> bool:
    writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
    return writes or event == "os.mkdir"
