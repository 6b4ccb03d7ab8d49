"""The command line on simulated hosts, with the engines of a cluster."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("recipe", "roles", "steps"),
    [
        ("grpo_tiny_cluster", ["actor", "reference", "rollout"], 8),
        ("ppo_tiny_cluster", ["actor", "critic", "reference", "rollout"], 16),
    ],
)
def test_the_tiny_recipe_learns_on_two_hosts(recipe: str, roles: list[str], steps: int, tmp_path: Path) -> None:
    """In a few steps it gains a tenth and more."""
    pins = [f"roles.{role}.gpus=2" for role in roles]
    overrides = [f"recipe={recipe}", "cluster=2x1@cpu", f"steps={steps}", f"evaluation.every={steps}", *pins]
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", *overrides],
        cwd=tmp_path,
        env={**os.environ, "RLFLOW_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "2 of 2 processors on simulated hosts" in done.stdout
    told = re.search(r"eval_before ([\d.]+), eval_after ([\d.]+)", done.stdout)
    assert told is not None
    before, after = map(float, told.groups())
    assert after >= before + 0.1
    (folder,) = tmp_path.glob("outputs/*/*")
    placement = json.loads((folder / "placement.json").read_text())
    assert placement["simulated"] is True
    assert sorted(placement["roles"]) == roles
    for workers in placement["roles"].values():
        assert [worker[0]["planned"]["host"] for worker in workers] == ["host-0", "host-1"]
        assert all(worker[0]["planned"]["host"] == worker[0]["bound"]["host"] for worker in workers)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    differences = [line["update/sampler_difference"] for line in lines if "update/sampler_difference" in line]
    # Both compute in float32; what is left are the orders of their sums.
    assert len(differences) == steps
    assert max(differences) < 1e-4
