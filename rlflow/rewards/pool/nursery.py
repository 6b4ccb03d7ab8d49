"""The process that workers are forked from: ``python -m rlflow.rewards.pool.nursery FD``.

FD is a socket. What to import comes first, as a message; then numbers: 0 and the end of a worker's socket, answered
with the process id of the new worker, or the process id of a worker to be ended, answered with how it ended. The
nursery ends, and all of its workers with it, when the other end of the socket has gone.
"""

import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress

from rlflow.errors import EngineError, UserError, first_line
from rlflow.rewards.found import Findable, Found
from rlflow.rewards.pool.channel import Channel
from rlflow.rewards.pool.worker import work
from rlflow.rewards.processes import become_subreaper, children, descendants, kill

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
