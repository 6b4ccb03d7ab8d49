"""Workers of Ray that are forked from a process that has imported their libraries, because imports take seconds.

In place of a worker Ray starts a stand-in, which passes its arguments, environment and output to the fork server. The
worker and its stand-in end together.
"""

import argparse
import atexit
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import TextIO
from unittest.mock import patch

# Ray itself is missing, because it reads its environment when it is imported.
_MODULES = (
    "aiohttp",
    "google.protobuf.descriptor_pb2",
    "grpc",
    "jsonschema",
    "msgpack",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "rlflow.engines.fake",
    "rlflow.engines.torch",
    "rlflow.engines.transformers",
    "rlflow.runtime.objects.object_process",
    "rlflow.runtime.ray.worker",
)
_STAND_IN = """\
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
socket.send_fds(server, [b"."], [1, 2])
server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
server.recv(1)
"""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the workers of every Ray that this process starts inside."""
    from ray._private import ray_constants

    with patch.object(ray_constants, "SETUP_WORKER_FILENAME", str(_stand_in())):
        yield


@cache
def _stand_in() -> Path:
    """Start the fork server, which ends with this process, and return the program that Ray starts as a worker."""
    folder = Path(tempfile.mkdtemp(prefix="ray-workers-"))
    atexit.register(shutil.rmtree, folder)
    path = str(folder / "socket")
    ready, theirs = multiprocessing.Pipe()
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        multiprocessing.get_context("spawn").Process(target=_serve, args=(path, theirs), daemon=True).start()
    theirs.close()
    ready.recv()  # Ray gives up on workers that do not start within a minute
    stand_in = folder / "stand_in.py"
    stand_in.write_text(_STAND_IN.format(path=path))
    return stand_in


def _serve(path: str, ready: Connection) -> None:
    multiprocessing.current_process().daemon = False  # workers may start processes
    for module in _MODULES:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers that have ended
    parent = multiprocessing.parent_process()
    assert parent is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        ready.send(None)
        while parent.sentinel not in wait([listener, parent.sentinel]):
            with listener.accept()[0] as stand_in:
                if os.fork() == 0:
                    listener.close()
                    _work(stand_in)


def _work(stand_in: socket.socket) -> None:
    """Do the work that ``stand_in`` was started for."""
    try:
        os.setpgid(0, 0)  # Ray kills the process group of a worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, files, _, _ = socket.recv_fds(stand_in, 1, 2)
        for file, number in zip(files, (1, 2), strict=True):
            os.dup2(file, number)
            os.close(file)
        request = stand_in.makefile()
        command, environment, folder = json.loads(request.readline())
        Thread(target=_end_with, args=[request], daemon=True).start()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        # The options of the program that sets up a worker, and would start another one with the rest.
        setup = argparse.ArgumentParser()
        setup.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
        setup.add_argument("--language")
        options, sys.argv = setup.parse_known_args(command)
        os.environ.update(options.serialized_runtime_env_context.get("env_vars") or {})
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        pass
    except BaseException:  # whatever it is, the process must not go on as a copy of the server
        traceback.print_exc()
    finally:
        os._exit(0)


def _end_with(stand_in: TextIO) -> None:
    stand_in.read()  # returns when it has ended
    os.kill(os.getpid(), signal.SIGKILL)
