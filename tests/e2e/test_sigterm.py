"""A run that is told to stop by SIGTERM ends after its step and leaves a checkpoint, in this process and on Ray."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CONFIG_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENDLESS = ("steps=100000", "checkpoints.every=100000", "evaluation=null", "hydra.run.dir=run")
ON_RAY = ("cluster=2x1@cpu", "roles.rollout.colocate=[]")


@pytest.mark.parametrize("place", [("cluster=local",), pytest.param(ON_RAY, marks=pytest.mark.soak)])
def test_sigterm_leaves_a_checkpoint(place: tuple[str, ...], tmp_path: Path) -> None:
    words = ["--config-dir", str(CONFIG_DIR), "recipe=fake", *place, *ENDLESS]
    command = [sys.executable, "-m", "rlflow", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("fake: "):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 143, rest
    assert "stopping after this step" in rest
    assert "Traceback" not in rest
    assert (tmp_path / "run" / "placement.json").exists() == (place == ON_RAY)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "stopped"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
