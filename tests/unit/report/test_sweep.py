"""The end of a sweep: the table of its runs, also as a file, whatever became of them."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from rlflow.report.sweep import run_rows, runs_csv, runs_table, sweep_summary
from rlflow.report.sweep_jobs import Job, SweepFolder

SPEEDS = (10.0, 500.0, 520.0, 480.0)


def trained(folder: Path, rate: str, score: float | None, *, verdict: str | None = None, **report: Any) -> Job:
    """Write the files of a run of an hour on 4 GPUs, and return its job."""
    folder.mkdir(parents=True)
    measured: dict[str, Any] = {
        "status": "finished",
        "steps": 4,
        "seconds": 3600.0,
        "eval_before": None,
        "eval_after": score,
        **{"nodes": {}, "memory": {}, "store": {}, "warnings": []},
    }
    measured |= {"step": {"measured": 2.0}} | report
    (folder / "report.json").write_text(json.dumps(measured))
    plan = {"num_gpus": 4, "verdict": verdict, "recipe": {"name": "mine", "steps": 4}}
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [{"step": 0, "evaluation/reward": 0.5}]
    lines += [{"step": step, "tokens_per_second": speed} for step, speed in enumerate(SPEEDS, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Job(
        overrides=("recipe=mine", f"roles.actor.optimizer.learning_rate={rate}"), folder=str(folder), dry_run=False
    )


def jobs(folder: Path, verdict: str | None = None) -> list[Job]:
    failed = ("recipe=mine", "roles.actor.optimizer.learning_rate=7")
    return [
        Job(overrides=failed, folder=str(folder / "0"), dry_run=False, exit_code=2, reason="lr: 7 is too much"),
        trained(folder / "1", "0.1", 0.25, verdict=verdict),
        trained(folder / "2", "0.2", None, verdict=verdict, status="stopped"),
        trained(folder / "3", "0.30000000017", 0.75, verdict=verdict, steps=3),
    ]


def printed(found: list[Job]) -> list[str]:
    console = Console(width=120, file=io.StringIO(), highlight=False)
    console.print(runs_table(run_rows(found)))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_best_run_comes_first_and_failed_ones_last(tmp_path: Path) -> None:
    """The first step is no part of the speed: the median of the others is 500."""
    lines = printed(jobs(tmp_path))
    assert lines[0] == "sweep run status steps evaluation step tokens/s time"
    assert lines[2:] == [
        "learning_rate=0.3 3 finished 3 0.750 best 2.0 s 500 1.0 hours",
        "learning_rate=0.1 1 finished 4 0.250 2.0 s 500 1.0 hours",
        "learning_rate=0.2 2 stopped 4 - 2.0 s 500 1.0 hours",
        "learning_rate=7 0 failed - - - - -",
        "",
        "learning_rate=7: lr: 7 is too much.",
    ]


def test_a_run_of_an_hour_on_four_gpus_takes_four_gpu_hours(tmp_path: Path) -> None:
    lines = printed(jobs(tmp_path, verdict="FITS"))
    assert lines[0].endswith("time GPU-hours")
    assert lines[2].endswith("1.0 hours 4")


def test_the_table_is_a_file_too(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(runs_csv(run_rows(jobs(tmp_path, verdict="FITS"))))))
    assert [row["roles.actor.optimizer.learning_rate"] for row in rows] == ["0.30000000017", "0.1", "0.2", "7"]
    assert rows[0] == {
        **{"folder": str(tmp_path / "3"), "roles.actor.optimizer.learning_rate": "0.30000000017", "status": "finished"},
        **{"steps": "3", "evaluation": "0.75", "step_seconds": "2.0", "tokens_per_second": "500.0"},
        **{"seconds": "3600.0", "gpu_hours": "4.0"},
    }
    assert (rows[3]["status"], rows[3]["evaluation"]) == ("failed", "")


def fail_after(folder: Path, config: Any) -> None:
    """Start a sweep whose launcher fails after its jobs have ended."""
    with sweep_summary() as codes:
        SweepFolder().on_multirun_start(config)
        for number, job in enumerate(jobs(folder)):
            job.write(folder, number)
        raise RuntimeError("the launcher failed", codes)


def test_the_jobs_of_other_processes_are_shown_when_the_sweep_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that an earlier sweep has left in the folder is none of its own."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "99.json").write_text("{}")
    with pytest.raises(RuntimeError, match="the launcher failed") as raised:
        fail_after(tmp_path, OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert raised.value.args[1] == [2, 0, 0, 0]
    out = capsys.readouterr().out
    assert "0.750 best" in out
    assert f"table: {tmp_path / 'runs.csv'}\npage: {tmp_path / 'runs.html'}\n" in out
    assert (tmp_path / "runs.csv").read_text().count("\n") == 5
    with sweep_summary() as codes:
        pass
    assert codes == [], "a single run is no sweep"
