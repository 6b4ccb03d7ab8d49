"""A tiny mixture of experts learns on two simulated hosts, with experts in parallel and those of its sampler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CONFIG_DIR

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache in which all runs find the model that they start from."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_gains(models: Path, seed: int, tmp_path: Path) -> None:
    assert gain(models, tmp_path, "cluster=2x2@cpu", f"seed={seed}") >= 0.35


def test_it_gains_by_adapters_of_experts(models: Path, tmp_path: Path) -> None:
    """The engine gets the merged model. The run may start from a score that leaves less room than 0.35."""
    options = (
        *("cluster=2x1@cpu", "roles.actor.expert_parallel_size=1"),
        *("roles.actor.colocate=auto", "roles.rollout.colocate=auto"),
        *("roles.actor.lora={rank: 16, experts: true, merge: true}", "roles.actor.optimizer.learning_rate=5e-3"),
    )
    assert gain(models, tmp_path, *options) >= 0.25


def gain(models: Path, folder: Path, *options: str) -> float:
    """Return by how much the held-out reward of a run rises. Its engines agree about logprobs in every step."""
    recipe = ("--config-dir", str(CONFIG_DIR), "recipe=experts_tiny", "hydra.run.dir=run", *options)
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", *recipe],
        cwd=folder,
        env={**os.environ, "RLFLOW_CACHE": str(models)},
        capture_output=True,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stderr
    assert "actor replays the experts that rollout used" in done.stdout
    report = json.loads((folder / "run" / "report.json").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [line["update/sampler_difference"] for line in lines if "update/sampler_difference" in line]
    # Both compute in float32 with the same experts, and only the orders of their sums differ.
    assert max(differences) < 1e-4
    return float(report["eval_after"] - report["eval_before"])
