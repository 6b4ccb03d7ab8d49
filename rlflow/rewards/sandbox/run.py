"""Runs a program in the sandbox.

``run`` is called in the parent. It forks a child, which enters new namespaces and forks the guard, process 1 of its
namespace. The guard starts the program and reports how it ended.
"""

import json
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from rlflow.errors import first_line
from rlflow.rewards.sandbox.confine import NOBODY, exec_program, watch_program
from rlflow.rewards.sandbox.root import MIB, Limits, build_root
from rlflow.system.processes import PDEATHSIG, check_result, children, kill, libc, prctl

# The guard enforces the deadline. The parent waits this much longer, in case a busy host delays the guard.
_GRACE_S = 0.5
_NEW_USER = 0x10000000
# Mounts, cgroups, host name, IPC, processes, network.
_NEW_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_DUMPABLE = 4


class SandboxError(Exception):
    """The sandbox is not available here, or it broke. It says nothing about the program."""


class LateSandboxError(SandboxError):
    """The sandbox has not started within the time of the program."""


@dataclass(frozen=True)
class Exit:
    """The way a program ended, with its output."""

    reason: Literal["exited", "timeout", "memory"]
    code: int | None
    """The exit code of a program that exited; minus the number of the signal that killed it."""
    output: bytes
    """The standard output, cut at the limit."""


class _Pipes(NamedTuple):
    """File descriptors of the child. The program gets only its own two."""

    program: tuple[int, int]
    """The program's input and output."""
    report: int
    """The guard writes lines of JSON: ``started``; then ``ended`` (exited, timeout, memory) and ``code``; or
    ``failed``."""
    is_ready: int
    """The child writes a byte when its user namespace exists."""
    go: int
    """The child reads a byte when the parent has mapped users into the namespace."""


def run(program: str, stdin: bytes, limits: Limits) -> Exit:
    """Run Python source with ``stdin`` as its standard input; none of its processes survives this call.

    The calling process must have no threads. Raises SandboxError.
    """
    deadline = time.monotonic() + limits.timeout_s
    opened = [os.memfd_create("input"), os.memfd_create("output"), *os.pipe(), *os.pipe(), *os.pipe()]
    program_input, program_output, report_end, report, ready_end, is_ready, go, go_end = opened
    try:
        os.write(program_input, stdin)
        os.lseek(program_input, 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            os.close(go_end)
            _enter(program, _Pipes((program_input, program_output), report, is_ready, go), limits, deadline)
        for end in (report, is_ready, go):
            os.close(end)
            opened.remove(end)
        ended = _read_report(child, ready_end, go_end, report_end, deadline + _GRACE_S)
        return Exit(ended["ended"], ended["code"], os.pread(program_output, limits.file_mib * MIB, 0))
    except OSError as error:
        raise SandboxError(first_line(error)) from error
    finally:
        for end in opened:
            os.close(end)


def _read_report(child: int, ready_end: int, go_end: int, report_end: int, deadline: float) -> dict[str, Any]:
    """Return the guard's last report after the guard and the child have ended. Raises OSError and SandboxError."""
    received, is_closed = b"", False
    try:
        if os.read(ready_end, 1):
            _map_ids(child)
            os.write(go_end, b"g")
        while not is_closed and select.select([report_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            received += (new := os.read(report_end, select.PIPE_BUF))
            is_closed = not new
    finally:
        if is_closed:
            os.waitpid(child, 0)
        else:
            _kill_guard(child)
    report: dict[str, Any] = {}
    for report in map(json.loads, received.splitlines()):
        if "failed" in report:
            raise SandboxError(report["failed"])
        if "ended" in report:
            return report
    if is_closed:
        raise SandboxError("the guard of the program ended without a report")
    if not report:
        raise LateSandboxError("the guard of the program did not start in time")
    return {"ended": "timeout", "code": None}


def _kill_guard(child: int) -> None:
    """Kill the guard and wait for the child, which waits for the guard.

    Killing the child first would leave the guard to a subreaper.
    """
    os.kill(child, signal.SIGSTOP)
    if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):
        # While the child is stopped it cannot fork: it has a guard now or will never have one.
        for pid in children(child) or [child]:
            kill(pid)
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)


def _map_ids(child: int) -> None:
    """Map users into the child's namespace: for root, root and nobody; for others, the user itself.

    The guard runs as the first of them, and the program of root's guard as nobody. Raises OSError.
    """
    process = Path(f"/proc/{child}")
    if os.getuid() == 0:
        (process / "uid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
        (process / "gid_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1")
    else:
        (process / "setgroups").write_text("deny")
        (process / "uid_map").write_text(f"{os.getuid()} {os.getuid()} 1")
        (process / "gid_map").write_text(f"{os.getgid()} {os.getgid()} 1")


def _enter(program: str, pipes: _Pipes, limits: Limits, deadline: float) -> NoReturn:
    """Enter new namespaces, fork the guard and wait for it. Runs in the child."""
    parent = os.getppid()
    try:
        check_result(libc.unshare(_NEW_USER), "unshare user")
        prctl(PDEATHSIG, signal.SIGKILL)
        os.write(pipes.is_ready, b"r")
        if os.read(pipes.go, 1) and os.getppid() == parent:
            check_result(libc.unshare(_NEW_OTHERS), "unshare")
            guard = os.fork()
            if guard == 0:
                _guard(program, pipes, limits, deadline)
            else:
                os.close(pipes.report)
                os.waitpid(guard, 0)
    except BaseException as error:  # whatever it is, the process must not continue as a copy of its parent
        _report(pipes.report, failed=first_line(error))
    finally:
        os._exit(0)


def _guard(program: str, pipes: _Pipes, limits: Limits, deadline: float) -> None:
    """Run the program as process 1 of its namespace, which the program cannot kill. Raises OSError."""
    prctl(PDEATHSIG, signal.SIGKILL)
    prctl(_DUMPABLE, 0)
    # From inside its namespace, only signals that process 1 handles can end it, and Python handles SIGINT.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    build_root(program, limits)
    _report(pipes.report, started=True)
    is_starting, end = os.pipe()
    child = os.fork()
    if child == 0:
        exec_program(*pipes.program, limits)
    os.close(end)
    # The pipe closes when the program starts. Until then the child counts as large as the process that called ``run``.
    select.select([is_starting], [], [], max(0.0, deadline - time.monotonic()))
    reason, code = watch_program(child, limits, deadline)
    _report(pipes.report, ended=reason, code=code)


def _report(pipe: int, **content: Any) -> None:
    os.write(pipe, json.dumps(content).encode() + b"\n")
