"""Engines in processes of their own: libraries bind threads, warn, and keep what cannot be had twice in one process."""

import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_class

_SECONDS = 200


class EngineProcess:
    """Answers one call after another. ``send`` and ``receive`` apart let several processes work at once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """``function`` is one of a module, and gets the list of the process's engines before ``arguments``."""
        self._pipe.send((function, arguments))

    def receive(self) -> Any:
        result = self.answer()
        if isinstance(result, Exception):
            raise result
        return result

    def answer(self) -> Any:
        """The result of a call, or the error that it raised."""
        assert self._pipe.poll(_SECONDS), f"no answer in {_SECONDS} s"
        return self._pipe.recv()

    def build(self, engine: str, spec: EngineSpec) -> "RemoteEngine":
        self.send(build, engine, spec)
        return RemoteEngine(self, self.receive())

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class RemoteEngine:
    """Has the methods of the engine behind it."""

    def __init__(self, process: EngineProcess, place: int) -> None:
        self._process, self._place = process, place

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self._process.send(call, self._place, method, *arguments)
            return self._process.receive()

        return ask


@contextmanager
def processes(count: int) -> "Iterator[Sequence[EngineProcess]]":
    started = [EngineProcess() for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.close()


def all_of(processes: Sequence[EngineProcess], function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """The results of a call in every process at once; each of ``arguments`` has a value for every process."""
    for process, values in zip(processes, zip(*arguments, strict=True), strict=True):
        process.send(function, *values)
    answers = [process.answer() for process in processes]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def free_address() -> str:
    """Where the workers of a role can meet on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def build(engines: list[Any], engine: str, spec: EngineSpec) -> int:
    """The engine's place among those of the process."""
    engines.append(engine_class(engine)(spec))
    return len(engines) - 1


def call(engines: list[Any], place: int, method: str, *arguments: Any) -> Any:
    result = getattr(engines[place], method)(*arguments)
    return [(name, tensor.detach().clone()) for name, tensor in result] if method == "weights" else result


def _serve(pipe: Connection) -> None:
    engines: list[Any] = []
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(engines, *arguments)
        except Exception as error:  # whatever it is, it is raised where the call was made
            answer = error
        pipe.send(answer)
