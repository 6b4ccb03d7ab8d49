"""Nothing gets out of the sandbox, all of it is over in time, and nothing has 0 by accident."""

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlflow.rewards.base import Outcome
from rlflow.rewards.part import Part
from rlflow.rewards.pool.calls import Call
from rlflow.rewards.pool.pool import Pool
from rlflow.rewards.processes import children
from tests.unit.rewards.attacks import ATTACKS, Attack
from tests.unit.rewards.sandboxes import needs_sandbox

DEADLINE_S = 1.0
pytestmark = [pytest.mark.slow, needs_sandbox]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of one worker, so that what a program does to it would be seen by the next."""
    os.environ["TOKEN"] = "secret"
    pool = Pool({"code": Part(timeout_s=DEADLINE_S)}, num_workers=1)
    yield pool
    pool.stop()
    del os.environ["TOKEN"]


def outcome(pool: Pool, program: str, test: Mapping[str, Any]) -> Outcome:
    call = Call("code", [0], [f"```python\n{program}\n```"], [{"tests": [test]}])
    before = [worker.pid for worker in pool.workers]
    began = time.monotonic()
    ((_, (given,)),) = list(pool.outcomes([call]))
    assert time.monotonic() - began < DEADLINE_S + 1
    (worker,) = pool.workers
    assert before in ([], [worker.pid]), "the worker was ended"
    assert children(worker.pid) == [], "something of it still runs"
    answer: Outcome = given
    return answer


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_program(attack: Attack, pool: Pool, tmp_path: Path) -> None:
    secret, left, home = tmp_path / "secret", tmp_path / "left", Path.home()
    secret.write_text("secret")
    called, written = {"call": "f", "arguments": [], "result": "secret"}, {"input": "", "output": "secret"}
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        words = {"SECRET": secret, "LEFT": left, "HOME": home, "PORT": server.getsockname()[1]}
        program = re.sub("|".join(words), lambda word: str(words[word[0]]), attack.program)
        assert outcome(pool, program, called if attack.is_function else written) == attack.reward
    assert secret.read_text() == "secret"
    assert not left.exists()
    assert not (home / "rlflow_was_here").exists()
