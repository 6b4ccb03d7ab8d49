"""Engines in processes of their own: libraries bind threads, warn, and keep what cannot be had twice in one process.

To import vLLM or DeepSpeed takes seconds, so each is imported once, by a template from which processes are forked.
"""

import json
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_kind
from rlflow.engines.serving.settings import set_environment
from tests.helpers import spec

_SECONDS = 200
# The modules that engines of a library import when they are built.
_MODULES = {
    "deepspeed": [
        "deepspeed",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "functorch.compile",
        "peft",
        "rlflow.engines.deepspeed",
        "transformers.models.qwen3.modeling_qwen3",
    ],
    "vllm": [
        "compressed_tensors.compressors",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "rlflow.engines.vllm",
        "rlflow.engines.serving.vllm_worker",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.model_loader.reload.layerwise",
    ],
}


class EngineProcess:
    """Answers one call after another. ``send`` and ``receive`` apart let several processes work at once."""

    def __init__(self, library: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._pid = _template(library).fork(theirs)

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of a module with the list of the process's engines and ``arguments``."""
        self._pipe.send((function, arguments))

    def receive(self) -> Any:
        result = self.answer()
        if isinstance(result, Exception):
            raise result
        return result

    def answer(self) -> Any:
        """Return the result of a call, or the error that it raised."""
        assert self._pipe.poll(_SECONDS), f"no answer in {_SECONDS} s"
        return self._pipe.recv()

    def build(self, engine: str, of: EngineSpec) -> "RemoteEngine":
        self.send(build, engine, of)
        return RemoteEngine(self, self.receive())

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        with suppress(EOFError, ConnectionResetError):  # the process has ended
            while True:
                self._pipe.recv_bytes()
        self._pipe.close()


class RemoteEngine:
    """An engine in another process, with all its methods."""

    def __init__(self, process: EngineProcess, place: int) -> None:
        self._process, self._place = process, place

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self._process.send(call, self._place, method, *arguments)
            return self._process.receive()

        return ask


@contextmanager
def processes(count: int, library: str = "deepspeed") -> "Iterator[Sequence[EngineProcess]]":
    """Yield processes that have imported the modules of ``library``'s engines."""
    started = [EngineProcess(library) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.close()


def all_of(processes: Sequence[EngineProcess], function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a call in all processes at once; each of ``arguments`` has a value for every process."""
    for process, values in zip(processes, zip(*arguments, strict=True), strict=True):
        process.send(function, *values)
    answers = [process.answer() for process in processes]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def free_address() -> str:
    """Return an address where the workers of a role can meet on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def build(engines: list[Any], engine: str, of: EngineSpec) -> int:
    """Build an engine, and return its place among those of the process."""
    engines.append(engine_kind(engine).engine(of))
    return len(engines) - 1


def call(engines: list[Any], place: int, method: str, *arguments: Any) -> Any:
    result = getattr(engines[place], method)(*arguments)
    return [(name, tensor.detach().clone()) for name, tensor in result] if method == "weights" else result


class _Template:
    """A process that has imported a library, and is copied on request. It ends with this process."""

    def __init__(self, library: str) -> None:
        self._socket, theirs = socket.socketpair()
        # Several threads of each process would wait for one another on a machine of two cores.
        with theirs, patch.dict(os.environ, OMP_NUM_THREADS="1"):
            spawn = multiprocessing.get_context("spawn")
            spawn.Process(target=_fork, args=(theirs, library), daemon=True).start()
        self._socket.settimeout(_SECONDS)

    def fork(self, pipe: Connection) -> int:
        """Pass ``pipe`` to a new process with this one's environment, and return its number."""
        with pipe:
            socket.send_fds(self._socket, [json.dumps(dict(os.environ)).encode()], [pipe.fileno()])
        return int(self._socket.recv(16))


@cache
def _template(library: str) -> _Template:
    return _Template(library)


def _fork(control: socket.socket, library: str) -> None:
    multiprocessing.current_process().daemon = False  # engines may start processes
    # Libraries read the environment when they are imported, so engines set it before.
    if library == "vllm":
        set_environment(spec())
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in _MODULES[library]:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that have ended
    while True:
        environment, (end, *_), _, _ = socket.recv_fds(control, 1 << 18, 1)
        if not environment:
            return
        if pid := os.fork():
            os.close(end)
            control.sendall(str(pid).encode())
            continue
        try:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.update(json.loads(environment))
            _serve(Connection(end))
        except BaseException:  # whatever it is, the process must not go on as a copy of its parent
            traceback.print_exc()
        finally:
            os._exit(0)


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
