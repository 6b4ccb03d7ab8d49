"""A run that is told to stop by SIGTERM ends after its step and leaves a checkpoint, in this process and on Ray."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CONFIG_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

OPTIONS = ("checkpoints.every=100000", "evaluation=null", "hydra.run.dir=run")
# A run notices after about 7 s that its Ray has ended, so a shorter step would still be in time for a checkpoint.
SLOW_REWARD = """
import time

def slow(texts, rows):
    time.sleep(9)
    return [1.0] * len(texts)
"""
IN_THIS_PROCESS = ("cluster=local", "steps=100000")
# With rollout and actor on one GPU the plan would not need Ray. One prompt is one call of the reward. The default of
# timeout_s is 10 s, which a busy machine may exceed.
ON_RAY = (
    "cluster=2x1@cpu",
    "roles.rollout.colocate=[]",
    "graph.rewards.function=null",
    "graph.rewards.functions={slow: {function: 'slow_reward:slow', timeout_s: 60}}",
    "data.batch_size=1",
    "steps=9",
)


@pytest.mark.parametrize(
    ("place", "awaited_line", "send"),
    [(IN_THIS_PROCESS, "fake: ", os.kill), (ON_RAY, "step     1", os.killpg)],
    ids=["in this process", "on Ray, to the whole group"],
)
def test_sigterm_leaves_a_checkpoint(
    place: tuple[str, ...], awaited_line: str, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    words = ["--config-dir", str(CONFIG_DIR), "recipe=fake", *place, *OPTIONS]
    with subprocess.Popen(
        [sys.executable, "-m", "rlflow", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        before = ""
        for line in process.stdout:
            before += line
            if line.startswith(awaited_line):
                send(process.pid, signal.SIGTERM)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 143, before + rest
    assert "stopping after this step" in rest
    assert "Traceback" not in rest
    assert (tmp_path / "run" / "placement.json").exists() == (place == ON_RAY)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "stopped"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
