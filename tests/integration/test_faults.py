"""Faults injected into runs on simulated hosts: the benchmark with few of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROBLEMS = ("hangs", "untyped", "lost", "doubled", "different_weights", "metrics_differ", "leftovers", "unfinished")


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        pytest.param(["--quick"], 20, marks=pytest.mark.slow),
        pytest.param(["--faults", "200"], 200, marks=[pytest.mark.soak, pytest.mark.slow]),
    ],
)
@pytest.mark.timeout(3600)
def test_runs_with_faults_end_as_an_undisturbed_one(options: list[str], faults: int, tmp_path: Path) -> None:
    """The benchmark has a process of its own: it forks runs, and threads do not survive a fork."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.faults", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures["faults"] >= faults
    assert {name: figures[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0), done.stdout
