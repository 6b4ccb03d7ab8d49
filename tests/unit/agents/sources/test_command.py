"""Programs as agents: what they are given, what they may answer, and that nothing of them stays."""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow.agents.base import Outcome
from rlflow.agents.load import load_agent
from rlflow.errors import RecipeError
from tests.unit.agents.scripted import ScriptedClient, play

READ = "import json, os, sys; row = json.load(sys.stdin); "


def run(code: str, row: Mapping[str, Any] | None = None) -> Any:
    return play(load_agent("command", {"command": [sys.executable, "-c", code]}), ScriptedClient(seed=5), row or {})


def test_a_program_reads_the_row_and_finds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = f"{READ}print('words'); print(json.dumps({{'reward': row['worth'], 'metrics': {{'words': 2}}}}))"
    assert run(code, {"worth": 0.5}) == Outcome(0.5, metrics={"words": 2})
    names = "[key for key in os.environ if key.startswith(('OPENAI', 'ANTHROPIC', 'RLFLOW', 'HF'))]"
    variables = (
        f"print(json.dumps({{'reward': 1, 'finished': False, 'metrics': {{k: os.environ[k] for k in {names}}}}}))"
    )
    outcome = run(READ + variables)
    assert not outcome.finished
    assert outcome.metrics == {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "token",
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": "token",
        "ANTHROPIC_MODEL": "policy",
        "RLFLOW_SEED": "5",
    }


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no luck')", "exited with 1: no luck"),
        ("print('fine')", "no JSON with a reward: 'fine'"),
        ("print('[]')", "no JSON with a reward"),
        ("print('{}')", "no JSON with a reward"),
        ("pass", "no JSON with a reward: ''"),
    ],
)
def test_a_program_that_fails_gives_no_outcome(code: str, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        run(code)


def test_a_cancelled_program_ends_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )

    async def cancel() -> None:
        agent = load_agent("command", {"command": [sys.executable, "-c", code]})
        task = asyncio.create_task(agent.run(ScriptedClient(), {}))
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    deadline = time.monotonic() + 5
    while any(map(is_running, map(int, pids.read_text().split()))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_there_is_no_default_program() -> None:
    with pytest.raises(RecipeError, match=r"options\.command: is missing"):
        load_agent("command", {})
    with pytest.raises(RecipeError, match=r"options\.command: is empty"):
        load_agent("command", {"command": []})
