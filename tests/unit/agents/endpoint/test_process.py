"""The life of an endpoint process."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.process import Endpoint
from rlflow.errors import EngineError
from tests.unit.agents.endpoint.conftest import ScriptedEngine, post, wait_for

pytestmark = pytest.mark.slow  # the endpoint takes some seconds to start


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_endpoint_that_dies_is_reported_once_and_one_that_stops_is_not(folder: Path) -> None:
    engine = ScriptedEngine()
    engine.start(folder)
    _, token = engine.open()
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert post(engine, "/v1/chat/completions", chat, {"x-api-key": token})[0] == 200
    status = Path(f"/proc/{engine.endpoint.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert resident < 200 * 1024
    os.kill(engine.endpoint.pid, signal.SIGKILL)
    wait_for(lambda: engine.deaths == ["exit code -9"])
    engine.endpoint.send([])
    engine.endpoint.stop()
    assert engine.deaths == ["exit code -9"]


def test_an_endpoint_ends_with_its_object(folder: Path) -> None:
    deaths: list[str] = []
    endpoint = Endpoint(ModelSpec(str(folder), "policy", 4096, 256), lambda messages: None, deaths.append)
    pid, reference = endpoint.pid, weakref.ref(endpoint)
    assert is_running(pid)
    del endpoint
    gc.collect()
    assert reference() is None
    assert not is_running(pid)
    assert deaths == []


def test_an_endpoint_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"the endpoint of agents did not start: the tokenizer in .* cannot be loaded"
    ):
        Endpoint(ModelSpec(str(tmp_path), "policy", 4096, 256), lambda messages: None, lambda reason: None)


def test_an_endpoint_ends_with_its_parent_even_if_a_child_of_that_lives_on(folder: Path) -> None:
    code = f"""
import os, time
from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.process import Endpoint
endpoint = Endpoint(ModelSpec({str(folder)!r}, "policy", 4096, 256), print, print)
child = os.fork() or time.sleep(600)
print(endpoint.pid, child, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        endpoint, child = map(int, parent.stdout.readline().split())
        parent.kill()
        wait_for(lambda: not is_running(endpoint))
        os.kill(child, signal.SIGKILL)
