"""The sandbox seen from outside: how a program ended, and what is told where there is no sandbox."""

import ctypes
import errno
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.rewards.base import Failure
from rlflow.rewards.functions import code
from rlflow.rewards.sandbox import confine, root
from rlflow.rewards.sandbox import run as run_module
from rlflow.rewards.sandbox.root import Limits
from rlflow.rewards.sandbox.run import Exit, SandboxError, run
from rlflow.system.processes import CHILD_SUBREAPER, children, prctl
from tests.unit.rewards.sandboxes import needs_sandbox

LIMITS = Limits(timeout_s=5.0)
TESTS = {"tests": [{"input": "", "output": "1"}]}


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("print(input() + '!')", Exit("exited", 0, b"hello!\n")),
        ("import sys; print(1); sys.exit(3)", Exit("exited", 3, b"1\n")),
        ("import os; os.kill(os.getpid(), 9)", Exit("exited", -9, b"")),
        ("raise ValueError", Exit("exited", 1, b"")),
    ],
)
def test_how_a_program_ended(program: str, ended: Exit) -> None:
    assert run(program, b"hello\n", LIMITS) == ended


@needs_sandbox
def test_the_caller_may_have_more_files_open_than_the_program_may() -> None:
    opened = [os.memfd_create("another") for _ in range(2 * LIMITS.num_files)]
    try:
        assert run("print(1)", b"", LIMITS) == Exit("exited", 0, b"1\n")
    finally:
        for each in opened:
            os.close(each)


@needs_sandbox
def test_one_that_is_late_or_large() -> None:
    # On a busy machine Python may take a while to start.
    endless = "print(1, flush=True)\nwhile True: pass"
    for timeout_s in (0.3, 3.0, 30.0):
        ended = run(endless, b"", Limits(timeout_s=timeout_s))
        assert ended.reason == "timeout"
        if ended.output:
            break
    assert ended == Exit("timeout", None, b"1\n")
    # It would end by itself before its time is over.
    several = "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(40 << 20)\ntime.sleep(9)"
    assert run(several, b"", Limits(timeout_s=60.0, memory_mib=300)).reason == "memory"


@needs_sandbox
def test_each_has_an_empty_home_of_its_own() -> None:
    program = "import os\nos.chdir(os.path.expanduser('~'))\nprint(os.path.exists('mine'))\nopen('mine', 'w')"
    assert [run(program, b"", LIMITS).output for _ in range(2)] == [b"False\n"] * 2


def test_a_host_without_namespaces_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(run_module, "libc", SimpleNamespace(unshare=refused))
    with pytest.raises(SandboxError, match=r"PermissionError: .* unshare user: Operation not permitted"):
        code.prepare()
    (given,) = code.reward(["```python\nprint(1)\n```"], [TESTS], timeout_s=1.0)
    assert isinstance(given, Failure), "not 0: nothing is known of the program"
    assert given.kind == "unavailable"


def test_a_guard_that_is_killed_says_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_guard", lambda *_: None)
    with pytest.raises(SandboxError, match="the guard of the program ended without a report"):
        run("print(1)", b"", LIMITS)


@needs_sandbox
def test_a_guard_that_is_late_says_that_the_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.rewards.sandbox.run._GRACE_S", 0.2)
    monkeypatch.setattr(run_module, "watch_program", lambda *_: time.sleep(60))
    before = children(os.getpid())
    prctl(CHILD_SUBREAPER, 1)
    try:
        assert run("print(1, flush=True)", b"", Limits(timeout_s=3.0)) == Exit("timeout", None, b"1\n")
        assert children(os.getpid()) == before, "nothing is left of it"
    finally:
        prctl(CHILD_SUBREAPER, 0)


@needs_sandbox
def test_a_guard_that_does_not_start_says_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.rewards.sandbox.run._GRACE_S", 0.1)
    monkeypatch.setattr(run_module, "build_root", lambda *_: time.sleep(60))
    with pytest.raises(SandboxError, match="the guard of the program did not start in time"):
        run("print(1)", b"", Limits(timeout_s=0.1))


@needs_sandbox
def test_a_sandbox_in_which_python_does_not_start_is_an_error() -> None:
    # Python is refused memory, or takes more than its share before the guard sees it.
    how = r"\((exited, code -?\d+|memory, code None)\)"
    with pytest.raises(SandboxError, match=rf"Python does not start in the sandbox {how}: memory_mib is 4"):
        code.prepare(memory_mib=4)


def test_a_home_that_would_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/usr/me")
    with pytest.raises(OSError, match="the home folder '/usr/me' is inside a folder of Python or of the system"):
        root.visible_paths()


def test_a_machine_whose_system_calls_are_not_known_is_refused() -> None:
    with pytest.raises(OSError, match="the sandbox supports x86_64 and aarch64, got riscv64"):
        confine._filter_instructions("riscv64")


@needs_sandbox
def test_the_memory_of_the_calling_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has its parent's pages until it starts the program, which takes longer where cores are busy."""
    start = confine.exec_program

    def start_late(*arguments: Any) -> None:
        time.sleep(0.3)
        start(*arguments)

    monkeypatch.setattr(run_module, "exec_program", start_late)
    pages = b"x" * (200 << 20)
    assert run("print(3)", b"", Limits(timeout_s=60.0, memory_mib=200)) == Exit("exited", 0, b"3\n")
    assert pages
