"""Sweeps of runs, with Hydra's own sweeper and launcher and with those of others."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import FAKE, Typed

SHORT = (*FAKE, "steps=2", "hydra.sweep.dir=sweep")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
OPTUNA = (
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_jobs=2",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=1",
)


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "sweep" / "runs.csv").read_text())))


def sweep(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Sweep in a process of its own, because these libraries warn when they are imported; return the output."""
    command = [sys.executable, "-m", "rlflow", "-m", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def best_trial(folder: Path) -> Any:
    return yaml.safe_load((folder / "sweep" / "optimization_results.yaml").read_text())


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_compared(typed: Typed, tmp_path: Path) -> None:
    code, out, errors = typed("-m", *SHORT, "seed=1,2,3")
    assert code == 0, errors
    rows = table(tmp_path)
    assert {row["seed"] for row in rows} == {"1", "2", "3"}
    reports = [json.loads((tmp_path / row["folder"] / "report.json").read_text()) for row in rows]
    scores = [float(row["evaluation"]) for row in rows]
    assert scores == sorted((report["eval_after"] for report in reports), reverse=True)
    assert out.endswith("table: sweep/runs.csv\npage: sweep/runs.html\n")
    assert all(f"sweep/{number}" in (tmp_path / "sweep" / "runs.html").read_text() for number in range(3))


@pytest.mark.slow
def test_optuna_goes_on_after_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    """The fastest of the plans is best. Joblib makes two of them at a time."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    large = ("recipe=grpo_32b", "roles.rollout.tensor_parallel_size=8", "dry_run=true", "hydra.sweep.dir=sweep")
    trials = ("hydra.sweeper.n_trials=6", "cluster=1x4,1x8,2x8")
    out = sweep(*OPTUNA, *JOBLIB, *large, *trials, cwd=tmp_path, code=2)
    ranked = [line.split()[:2] for line in out.splitlines() if line.startswith("cluster=")]
    assert ["cluster=1x4", "no"] in ranked
    assert ranked[0] == [f"cluster={best_trial(tmp_path)['best_params']['cluster']}", "yes"]


@pytest.mark.soak
def test_optuna_finds_the_run_with_the_best_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sweep(*SHORT, *OPTUNA, "hydra.sweeper.n_trials=3", "seed=range(0,100)", cwd=tmp_path)
    best = best_trial(tmp_path)
    assert best["best_value"] == max(float(row["evaluation"]) for row in table(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_other_processes_leave_the_same_table(launcher: str, tmp_path: Path) -> None:
    """Half of the runs have no data."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    sources = "data.source=nowhere.jsonl,rlflow.data.arithmetic:additions"
    sweep(*SHORT, f"hydra/launcher={launcher}", sources, "seed=1,2", cwd=tmp_path, code=2)
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished", "failed", "failed"]
