"""Running a program in the sandbox, seen from outside."""

import json
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import first_line
from rlflow.rewards.processes import children, kill
from rlflow.rewards.sandbox.confine import NOBODY
from rlflow.rewards.sandbox.enter import Pipes, enter
from rlflow.rewards.sandbox.root import MIB, Limits

# The guard keeps the deadline; this is for one that cannot, as on a host with too much to do.
_GRACE_S = 0.5


class SandboxError(Exception):
    """There is no sandbox here, or it broke: nothing is known of the program."""


@dataclass(frozen=True)
class Ended:
    how: Literal["exited", "timeout", "memory"]
    code: int | None
    """Of one that exited; a signal's number below zero."""
    output: bytes
    """What it wrote to its standard output, up to the limit."""


def run(program: str, given: bytes, limits: Limits) -> Ended:
    """Runs Python source with ``given`` as its standard input. When this returns, none of its processes is left.

    To be called in a process without threads. Raises SandboxError.
    """
    deadline = time.monotonic() + limits.timeout_s
    opened = [os.memfd_create("input"), os.memfd_create("output"), *os.pipe(), *os.pipe(), *os.pipe()]
    program_input, program_output, said, says, ready, is_ready, go, let_go = opened
    try:
        os.write(program_input, given)
        os.lseek(program_input, 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            os.close(let_go)
            enter(program, Pipes((program_input, program_output), says, is_ready, go), limits, deadline)
        for end in (says, is_ready, go):
            os.close(end)
            opened.remove(end)
        report = _report(child, ready, let_go, said, deadline + _GRACE_S)
        return Ended(report["ended"], report["code"], os.pread(program_output, limits.file_mib * MIB, 0))
    except OSError as error:
        raise SandboxError(first_line(error)) from error
    finally:
        for end in opened:
            os.close(end)


def _report(child: int, ready: int, let_go: int, said: int, until: float) -> dict[str, Any]:
    """What the guard says, once nothing of it is left. Raises OSError and SandboxError."""
    told, is_over = b"", False
    try:
        if os.read(ready, 1):
            _map_ids(child)
            os.write(let_go, b"g")
        while not is_over and select.select([said], [], [], max(0.0, until - time.monotonic()))[0]:
            told += (new := os.read(said, select.PIPE_BUF))
            is_over = not new
    finally:
        if is_over:
            os.waitpid(child, 0)
        else:
            _end(child)
    report: dict[str, Any] = {}
    for report in map(json.loads, told.splitlines()):
        if "failed" in report:
            raise SandboxError(report["failed"])
        if "ended" in report:
            return report
    if is_over:
        raise SandboxError("the guard of the program ended without a word")
    if not report:
        raise SandboxError("the guard of the program did not start in time")
    return {"ended": "timeout", "code": None}


def _end(child: int) -> None:
    """With the guard below it. The child itself waits for the guard, which would else be left to a subreaper."""
    os.kill(child, signal.SIGSTOP)
    if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
        # Now it has a guard or will never have one.
        for pid in children(child) or [child]:
            kill(pid)
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)


def _map_ids(child: int) -> None:
    """Users inside are those outside: the one that runs this; for root, root for the guard and nobody for the program.
    Raises OSError."""
    process = Path(f"/proc/{child}")
    if os.getuid() == 0:
        (process / "uid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
        (process / "gid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
    else:
        (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{os.getuid()} {os.getuid()} 1")
        (process / "gid_map").write_text(f"{os.getgid()} {os.getgid()} 1")
