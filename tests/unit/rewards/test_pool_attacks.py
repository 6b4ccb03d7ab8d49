"""Nothing gets out of the sandbox, all of it is over in time, and nothing has 0 by accident."""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlflow.rewards import base
from rlflow.rewards.base import Outcome
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import ProcessPool
from rlflow.system.processes import children
from tests.unit.rewards import ordinary
from tests.unit.rewards.attacks import ATTACKS, Attack
from tests.unit.rewards.sandboxes import needs_sandbox

DEADLINE_S = 1.0
# Programs that end by themselves have all the time of a busy machine; those that do not are over long before this.
LATE_S = 15.0
ORDINARY: Mapping[str, Any] = {"user": 12345, "group": 12345, "extra_groups": []}
pytestmark = [pytest.mark.slow, needs_sandbox]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Yield a pool of one worker, in which a program would see the damage of the one before."""
    terms = {"ended": RewardTerm(function="code", timeout_s=DEADLINE_S), "right": RewardTerm(function="code")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN", "secret")
        # A worker that is killed because the machine is busy would be taken for one that a program ended.
        patch.setattr(base, "_GRACE_S", LATE_S)
        pool = ProcessPool(terms, num_workers=1)
        yield pool
        pool.stop()


def outcome(pool: ProcessPool, name: str, program: str, test: Mapping[str, Any]) -> Outcome:
    before = [worker.pid for worker in pool.fork_server.workers]
    began = time.monotonic()
    (future,) = pool.submit(name, [f"```python\n{program}\n```"], [{"tests": [test]}])
    answer: Outcome = future.result(2 * LATE_S)
    assert time.monotonic() - began < LATE_S
    (worker,) = pool.fork_server.workers
    assert before in ([], [worker.pid]), "the worker was ended"
    assert children(worker.pid) == [], "something of it still runs"
    return answer


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_program(attack: Attack, pool: ProcessPool, tmp_path: Path) -> None:
    secret, left, home = tmp_path / "secret", tmp_path / "left", Path.home()
    secret.write_text("secret")
    called, written = {"call": "f", "arguments": [], "result": "secret"}, {"input": "", "output": "secret"}
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        words = {"SECRET": secret, "LEFT": left, "HOME": home, "PORT": server.getsockname()[1]}
        program = re.sub("|".join(words), lambda word: str(words[word[0]]), attack.program)
        name = "right" if attack.reward else "ended"
        assert outcome(pool, name, program, called if attack.is_function else written) == attack.reward
    assert secret.read_text() == "secret"
    assert not left.exists()
    assert not (home / "rlflow_was_here").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="the others are an ordinary user's already")
def test_attacks_on_the_guard_of_an_ordinary_user() -> None:
    """The guard and the program run as the same ordinary user here."""
    root = Path(__file__).parents[3]
    python = next(filter(may_run, (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")), None)
    if python is None:
        pytest.skip("an ordinary user may run no Python of this version here")
    path = f"{root}:{sysconfig.get_path('purelib')}"
    attacks = [attack for attack in ATTACKS if "guard" in attack.name or "killing" in attack.name]
    command = [python, "-m", ordinary.__name__, *(attack.name for attack in attacks)]
    environment = {"PYTHONPATH": path, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60, **ORDINARY)
    if "SandboxError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"not for an ordinary user here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    rewards = dict(map(json.loads, done.stdout.splitlines()))
    assert len(attacks) > 5
    assert rewards == {attack.name: attack.reward for attack in attacks}


def may_run(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", ""], cwd="/", timeout=10, **ORDINARY).returncode == 0
    except OSError:
        return False
