"""The command line on simulated hosts, with the engines of a cluster."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_tiny_recipe_learns_on_two_hosts(tmp_path: Path) -> None:
    """In eight steps it gains a tenth and more."""
    pins = [f"roles.{role}.gpus=2" for role in ("actor", "reference", "rollout")]
    overrides = ["recipe=grpo_tiny_cluster", "cluster=2x1@cpu", "steps=8", "evaluation.every=8", *pins]
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
    for workers in placement["roles"].values():
        assert [worker[0]["planned"]["host"] for worker in workers] == ["host-0", "host-1"]
        assert all(worker[0]["planned"]["host"] == worker[0]["bound"]["host"] for worker in workers)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    differences = [step["update/sampler_difference"] for step in steps if "update/sampler_difference" in step]
    # Both compute in float32; what is left are the orders of their sums.
    assert len(differences) == 8
    assert max(differences) < 1e-4
