"""Faults injected into runs on simulated hosts: the benchmark with few of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BAD = ("hangs", "untyped", "lost", "doubled", "different_weights", "metrics_differ", "leftovers", "unfinished")


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        pytest.param(["--quick"], 20, marks=pytest.mark.slow),
        pytest.param(["--faults", "200"], 200, marks=[pytest.mark.soak, pytest.mark.slow]),
    ],
)
@pytest.mark.timeout(3600)
def test_runs_with_faults_end_as_an_undisturbed_one(options: list[str], faults: int, tmp_path: Path) -> None:
    """In a process of its own: runs are forked, and threads of this one would not survive it."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.faults", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures["faults"] >= faults
    assert {name: figures[name] for name in BAD} == dict.fromkeys(BAD, 0), done.stdout
