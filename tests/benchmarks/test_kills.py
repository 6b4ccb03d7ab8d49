"""Runs that are killed, damaged or out of space, and resumed: the benchmark with a tenth of its kills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTED = (
    "kills",
    "kills_in_saves",
    "damages",
    "full_disks",
    "responses_found",
    "responses_interrupted",
    "replayed_share",
)
KILLS = 50


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """The benchmark has a process of its own: it forks runs, and threads do not survive a fork."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", str(KILLS), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures["kills"] >= KILLS
    assert figures["damages"] > 0
    assert figures["responses_found"] > 0
    problems = {name: value for name, value in figures.items() if value and name not in COUNTED}
    assert not problems, done.stdout
