"""A nursery as its owner has it."""

import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress

from rlflow.errors import EngineError
from rlflow.rewards.found import Findable
from rlflow.rewards.pool.channel import Channel
from rlflow.rewards.pool.nursery import NUMBER

# Imports may be of libraries as large as torch; forking and killing are not.
_START_S, _ANSWER_S = 300.0, 30.0


class Nursery:
    """It and its workers end by ``stop``, with this object, and with this process."""

    def __init__(self, parts: Mapping[str, Findable]) -> None:
        """Raises EngineError when the functions cannot be had there."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rlflow.rewards.pool.nursery", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.pid = process.pid
        self.stop = weakref.finalize(self, _stop, self._socket, process)
        self._socket.settimeout(_START_S)
        channel = Channel(self._socket)
        try:
            channel.send(pickle.dumps((sys.path, dict(parts))))
            answers = channel.messages()
        except OSError:
            answers = None
        if not answers:
            raise EngineError("the process that rewards are forked from did not start.")
        if answers[0] is not None:
            raise answers[0]
        self._socket.settimeout(_ANSWER_S)

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its process id, and our end of its socket. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._asked(0, [theirs.fileno()]), ours
            except BaseException:
                ours.close()
                raise

    def end(self, pid: int) -> int:
        """Kills a worker and everything that it has started. Its exit code, or the signal's number below zero."""
        return self._asked(pid, [])

    def _asked(self, number: int, ends: list[int]) -> int:
        answer = b""
        try:
            with suppress(OSError):
                socket.send_fds(self._socket, [NUMBER.pack(number)], ends)
                answer = self._socket.recv(NUMBER.size, socket.MSG_WAITALL)
        finally:
            if len(answer) < NUMBER.size:
                # An answer that comes late would be taken for that to the next question.
                self._socket.close()
        if len(answer) < NUMBER.size:
            raise EngineError("the process that rewards are forked from has died.")
        return int(NUMBER.unpack(answer)[0])


def _stop(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ANSWER_S)
        return
    process.kill()
    process.wait()
