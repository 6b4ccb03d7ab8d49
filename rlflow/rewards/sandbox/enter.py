"""Into new namespaces: the process between whoever runs a program and the program's guard."""

import json
import os
import signal
from typing import Any, NamedTuple, NoReturn

from rlflow.errors import first_line
from rlflow.rewards.processes import PDEATHSIG, checked, libc, prctl
from rlflow.rewards.sandbox.confine import become, watched
from rlflow.rewards.sandbox.root import Limits, build

_NEW_USER = 0x10000000
# Of mounts, cgroups, host name, IPC, processes, network.
_NEW_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_DUMPABLE = 4


class Pipes(NamedTuple):
    """Descriptors. None but those of the program stays open in it."""

    program: tuple[int, int]
    """Its input and output."""
    says: int
    """To write lines of JSON: ``started``; then ``ended`` (exited, timeout, memory) and ``code``; or ``failed``."""
    is_ready: int
    """To write a byte when the user namespace is there."""
    go: int
    """To read a byte when users are mapped into it."""


def enter(program: str, pipes: Pipes, limits: Limits, deadline: float) -> NoReturn:
    """In a child of whoever runs the program: it ends when the guard and all below it have."""
    parent = os.getppid()
    try:
        checked(libc.unshare(_NEW_USER), "unshare user")
        prctl(PDEATHSIG, signal.SIGKILL)
        os.write(pipes.is_ready, b"r")
        if os.read(pipes.go, 1) and os.getppid() == parent:
            checked(libc.unshare(_NEW_OTHERS), "unshare")
            child = os.fork()
            if child == 0:
                _guard(program, pipes, limits, deadline)
            else:
                os.close(pipes.says)
                os.waitpid(child, 0)
    except BaseException as error:  # whatever it is, the process must not go on as a copy of its parent
        _say(pipes.says, failed=first_line(error))
    finally:
        os._exit(0)


def _guard(program: str, pipes: Pipes, limits: Limits, deadline: float) -> None:
    """Process 1 of its namespace: nothing inside can end it, and with it all ends. Raises OSError."""
    prctl(PDEATHSIG, signal.SIGKILL)
    prctl(_DUMPABLE, 0)
    # Process 1 is ended by no signal from inside but those that it handles, and Python handles SIGINT.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    build(program, limits)
    _say(pipes.says, started=True)
    child = os.fork()
    if child == 0:
        become(*pipes.program, limits)
    how, code = watched(child, limits, deadline)
    _say(pipes.says, ended=how, code=code)


def _say(pipe: int, **what: Any) -> None:
    os.write(pipe, json.dumps(what).encode() + b"\n")
