"""The fork server, ``python -m rlflow.rewards.fork_server FD``: it imports what functions need and forks workers.

FD is a socket. The first message says what to import. After that, each request is a number: 0, with the socket of a
new worker, is answered with the worker's process id; a worker's process id ends that worker and is answered with its
exit code. When the other end of the socket closes, the server ends with all of its workers.

A worker sends a first message when it is ready, reads calls from its socket and answers each with its outcomes, in
order.
"""

import os
import pickle
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
from rlflow.rewards.base import CallableSpec, Failure, LoadedCallable
from rlflow.system.processes import become_subreaper, children, descendants, die_with_parent, kill, limit_memory

# Bytes that a function may allocate on top of what its worker had when it was forked.
_MEMORY_LIMIT = 4 * 2**30

# Bytes of the outcomes of one call. Rewards are numbers, but an environment answers with texts.
_MAX_ANSWER = 16 * 2**20

NUMBER = struct.Struct("<i")


def main(control: socket.socket) -> None:
    """Serve requests until the other end closes."""
    os.set_inheritable(control.fileno(), False)
    with control.makefile("rb") as reader:
        sys.path[:], specs = pickle.load(reader)
    try:
        callables = {name: _load(name, spec) for name, spec in specs.items()}
    except EngineError as error:
        control.sendall(pickle.dumps(error))
        return
    helpers = set(children(os.getpid()))
    """Processes that the imported modules started: they end with this server, not with a worker."""
    become_subreaper()
    control.sendall(pickle.dumps(None))
    workers: dict[int, int | None] = {}
    """The exit code of each worker; None while it runs."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the other end closed before it read the answer
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, NUMBER.size, 1)
            if not request:
                break
            pid = NUMBER.unpack(request)[0]
            if pid == 0:
                answer = _fork_worker(callables, control, descriptors[0])
                workers[answer] = None
            else:
                answer = _end_worker(pid, workers, helpers)
            control.sendall(NUMBER.pack(answer))
    for pid in list(workers):
        _end_worker(pid, workers, helpers)
    for pid in descendants(os.getpid()):
        kill(pid)


def _load(name: str, spec: CallableSpec) -> LoadedCallable:
    try:
        loaded = spec.load(name)
        loaded.prepare()
    except Exception as error:  # modules may raise anything on import
        reason = str(error) if isinstance(error, UserError) else first_line(error)
        raise EngineError(f"{spec.kind} '{name}' cannot be loaded in the fork server: {reason}") from None
    return loaded


def _fork_worker(callables: Mapping[str, LoadedCallable], control: socket.socket, end: int) -> int:
    server = os.getpid()
    if pid := os.fork():
        os.close(end)
        return pid
    code = 1
    try:
        control.close()
        os.set_inheritable(end, False)
        _run_worker(socket.socket(fileno=end), callables, server)
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0  # the other end has closed
    except BaseException:  # whatever it is, the process must not continue as a copy of its parent
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_worker(end: socket.socket, callables: Mapping[str, LoadedCallable], server: int) -> None:
    """Answer calls until the other end closes. ``server`` is the fork server's process id."""
    os.setsid()
    die_with_parent(server)
    become_subreaper()
    limit_memory(_MEMORY_LIMIT)
    with suppress(OSError):
        # Let the kernel kill this process before all others of the host when memory runs out.
        Path("/proc/self/oom_score_adj").write_text("1000")
    end.sendall(pickle.dumps(None))
    for loaded in callables.values():
        if loaded.serve is not None:
            return loaded.serve(end)
    calls = end.makefile("rb")
    while True:
        name, texts, rows = pickle.load(calls)
        answer = pickle.dumps(_call_batch(callables[name], texts, rows))
        if len(answer) > _MAX_ANSWER:
            fact = f"returned {len(answer) // 2**20} MiB, more than {_MAX_ANSWER // 2**20}"
            answer = pickle.dumps(Failure("invalid", fact))
        end.sendall(answer)


def _call_batch(loaded: LoadedCallable, texts: Sequence[str], rows: Sequence[Any]) -> list[Any] | Failure:
    """Return an outcome for each text, or why the call fails as a whole, whatever the function does."""
    try:
        values = list(islice(loaded.call(texts, rows), len(texts) + 1))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return Failure("raised", f"failed ({first_line(error)})")
    if len(values) != len(texts):
        plural = "" if len(texts) == 1 else "s"
        number = f"more than {len(texts)}" if len(values) > len(texts) else len(values)
        return Failure("invalid", f"returned {number} values for {len(texts)} response{plural}")
    return [loaded.check(value, text) for value, text in zip(values, texts, strict=True)]


def _end_worker(pid: int, workers: dict[int, int | None], helpers: set[int]) -> int:
    """Kill a worker with all that it started; return its exit code, or minus the number of its signal."""
    while True:
        # When a helper ends, the kernel hands its children to this process: they count as helpers.
        helpers.update([below for helper in helpers for below in descendants(helper)])
        _reap(workers, helpers)
        # Processes whose worker has ended are now children of this process.
        doomed = [child for child in children(os.getpid()) if child == pid or child not in {*workers, *helpers}]
        if not doomed:
            break
        for process in doomed + [below for root in doomed for below in descendants(root)]:
            kill(process)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, doomed[0], os.WEXITED | os.WNOWAIT)
    exit_code = workers.pop(pid)
    assert exit_code is not None
    return exit_code


def _reap(workers: dict[int, int | None], helpers: set[int]) -> None:
    """Collect the exit codes of children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            helpers.discard(pid)
            if pid in workers:
                workers[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the run was killed while this server started
        main(socket.socket(fileno=int(sys.argv[1])))
