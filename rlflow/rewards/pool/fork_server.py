"""In a worker: calls in, outcomes out, one after another.

The process that workers are forked from: ``python -m rlflow.rewards.pool.fork_server FD``.

FD is a socket. What to import comes first, as a message; then numbers: 0 and the end of a worker's socket, answered
with the process id of the new worker, or the process id of a worker to be ended, answered with how it ended. The
nursery ends, and all of its workers with it, when the other end of the socket has gone.
"""

import os
import pickle
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlflow.errors import EngineError, UserError, first_line
from rlflow.rewards.base import Failure, Findable, Found
from rlflow.rewards.processes import Channel, become_subreaper, children, descendants, die_with_parent, kill

# Of what a function may take beyond what is there when its worker is forked.
_MEMORY = 4 * 2**30


def work(channel: Channel, functions: Mapping[str, Found], nursery: int) -> None:
    """Answers until the other end has gone. ``nursery`` is the parent's process id."""
    os.setsid()
    die_with_parent(nursery)
    become_subreaper()
    # In pages: all, resident, shared, code, none, data.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + _MEMORY, data + _MEMORY))
    with suppress(OSError):
        # Of all processes of the host the first to go when memory is short.
        Path("/proc/self/oom_score_adj").write_text("1000")
    while (calls := channel.messages()) is not None:
        for part, texts, rows in calls:
            channel.send(pickle.dumps(outcomes_of(functions[part], texts, rows)))


def outcomes_of(found: Found, texts: Sequence[str], rows: Sequence[Any]) -> list[Any]:
    """As many as texts, whatever the function does."""
    try:
        given = list(islice(found.call(texts, rows), len(texts) + 1))
    except BaseException as error:  # whatever the user's own function raises, sys.exit too
        return [Failure("raised", f"failed ({first_line(error)})")] * len(texts)
    if len(given) != len(texts):
        plural = "" if len(texts) == 1 else "s"
        number = f"more than {len(texts)}" if len(given) > len(texts) else len(given)
        fact = f"returned {number} values for {len(texts)} response{plural}"
        return [Failure("invalid", fact)] * len(texts)
    return [found.check(value, text) for value, text in zip(given, texts, strict=True)]


NUMBER = struct.Struct("<i")


def main(control: socket.socket) -> None:
    """Until the other end has gone."""
    os.set_inheritable(control.fileno(), False)
    channel = Channel(control)
    messages: list[tuple[list[str], Mapping[str, Findable]]] | None = []
    while not messages:
        messages = channel.messages()
        if messages is None:
            return
    path, parts = messages[0]
    sys.path[:] = path
    try:
        functions = {name: _prepared(name, part) for name, part in parts.items()}
    except EngineError as error:
        channel.send(pickle.dumps(error))
        return
    helpers = set(children(os.getpid()))
    """What the functions' modules have started: it ends with this process, and not with a worker."""
    become_subreaper()
    channel.send(pickle.dumps(None))
    workers: dict[int, int | None] = {}
    """How each has ended, as far as it has."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the other end has gone without its answer
        while True:
            asked, given, _, _ = socket.recv_fds(control, NUMBER.size, 1)
            if not asked:
                break
            pid = NUMBER.unpack(asked)[0]
            if pid == 0:
                answer = _forked(functions, control, given[0])
                workers[answer] = None
            else:
                answer = _end(pid, workers, helpers)
            control.sendall(NUMBER.pack(answer))
    for pid in list(workers):
        _end(pid, workers, helpers)
    for pid in descendants(os.getpid()):
        kill(pid)


def _prepared(name: str, part: Findable) -> Found:
    try:
        found = part.find(name)
        found.prepare()
    except Exception as error:  # whatever modules raise on import
        reason = str(error) if isinstance(error, UserError) else first_line(error)
        raise EngineError(f"{part.what} '{name}' cannot be had in a process of its own: {reason}") from None
    return found


def _forked(functions: Mapping[str, Found], control: socket.socket, end: int) -> int:
    nursery = os.getpid()
    if pid := os.fork():
        os.close(end)
        return pid
    code = 1
    try:
        control.close()
        os.set_inheritable(end, False)
        work(Channel(socket.socket(fileno=end)), functions, nursery)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the other end has gone
    except BaseException:  # whatever it is, the process must not go on as a copy of its parent
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int, workers: dict[int, int | None], helpers: set[int]) -> int:
    """Kills a worker and everything that it has started; the exit code, or the signal's number below zero."""
    while True:
        # What a helper has started is left to this process as well when the helper ends.
        helpers.update([below for helper in helpers for below in descendants(helper)])
        _reap(workers, helpers)
        # What was started by a worker that is no more is a child of this process.
        doomed = [child for child in children(os.getpid()) if child == pid or child not in {*workers, *helpers}]
        if not doomed:
            break
        for each in doomed + [below for root in doomed for below in descendants(root)]:
            kill(each)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, doomed[0], os.WEXITED | os.WNOWAIT)
    status = workers.pop(pid)
    assert status is not None
    return status


def _reap(workers: dict[int, int | None], helpers: set[int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            helpers.discard(pid)
            if pid in workers:
                workers[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
