"""Faults injected into runs on simulated hosts: the benchmark with few of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fault_runs import SMALL, Undisturbed, differences
from benchmarks.kills import names

PROBLEMS = ("hangs", "untyped", "lost", "doubled", "different_weights", "metrics_differ", "leftovers", "unfinished")
WEIGHTS = f"checkpoints/step-{SMALL.steps:06d}/actor/weights-00000-00000.safetensors"
STEPS = ['{"step": 1, "tokens": 8, "reward": 0.5}', '{"step": 2, "tokens": 8, "reward": 0.7}']


@pytest.mark.soak
@pytest.mark.parametrize(("options", "faults"), [(["--quick"], 20), (["--faults", "200"], 200)])
@pytest.mark.timeout(3600)
def test_runs_with_faults_end_as_an_undisturbed_one(options: list[str], faults: int, tmp_path: Path) -> None:
    """The benchmark has a process of its own: it forks runs, and threads do not survive a fork."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.faults", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures["faults"] >= faults
    assert figures["compared"] == figures["runs"] > 0
    assert {name: figures[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0), done.stdout


def write_steps(folder: Path, *lines: str) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def finished_run(folder: Path) -> Path:
    """Write the files that are compared, as a finished run leaves them."""
    for name in (WEIGHTS, "model/actor/model.safetensors"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"weights")
    write_steps(folder, *STEPS)
    (folder / "samples.jsonl").write_text('{"step": 1, "choice": "best", "response": "4"}\n')
    return folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / WEIGHTS).write_bytes(b"weight5"), {"different_weights": 1}),
        (lambda folder: write_steps(folder, STEPS[0], STEPS[1].replace("7", "8")), {"metrics_differ": 1}),
        (lambda folder: write_steps(folder, *STEPS, STEPS[1]), {"doubled": 1}),
        (lambda folder: write_steps(folder, STEPS[0]), {"lost": 1, "metrics_differ": 1}),
        (lambda folder: (folder / "model/actor/model.tmp").touch(), {"leftovers": 1, "different_weights": 1}),
        (lambda folder: write_steps(folder, *(step.replace("}", ', "step_seconds": 3.1}') for step in STEPS)), {}),
    ],
    ids=["weights", "metrics", "doubled", "lost", "leftover", "times"],
)
def test_a_run_that_differs_from_the_undisturbed_one_is_noticed(
    change: Callable[[Path], object], problem: dict[str, int], tmp_path: Path
) -> None:
    undisturbed, run = (finished_run(tmp_path / name) for name in ("undisturbed", "run"))
    change(run)
    assert differences(run, Undisturbed(undisturbed, SMALL, names(undisturbed)), []) == problem
