"""The end of a sweep: its plans and runs as tables, pages and a file."""

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.plan import format_duration
from rlflow.report.console import output_console, print_picture
from rlflow.report.formats import PRICE_UNIT, format_gpu_hours, format_range, format_seconds
from rlflow.report.page import build_page
from rlflow.report.plan_page import PAGE
from rlflow.report.ranking import SweepOutcome, are_priced, own_overrides, ranked, ranking_table, swept_unit
from rlflow.report.run_page import run_page
from rlflow.report.sweep_jobs import Job, SweepFolder, read_jobs
from rlflow.system.text_files import replace_text

RUNS_TABLE, RUNS_PAGE = "runs.csv", "runs.html"
"""The names of the table and the page of runs in the folder of a sweep."""
# The runs that the page compares at most, the best ones. More curves could not be told apart.
_PAGE_RUNS = 10


@contextmanager
def sweep_summary() -> Iterator[list[int]]:
    """Show the jobs of a sweep when it ends, also with an error. Yield a list that then has their exit codes."""
    SweepFolder.path = None
    codes: list[int] = []
    try:
        yield codes
    finally:
        if SweepFolder.path is not None:
            jobs = read_jobs(SweepFolder.path)
            codes += [job.exit_code for job in jobs]
            _show_plans([job.outcome() for job in jobs if job.dry_run])
            _show_runs([job for job in jobs if not job.dry_run], SweepFolder.path)


def _show_plans(outcomes: Sequence[SweepOutcome]) -> None:
    if len(outcomes) < 2:
        return
    print_picture(ranking_table(outcomes))
    if (page := write_sweep_page(outcomes)) is not None:
        output_console().print(f"page: {page}", soft_wrap=True)


def _show_runs(jobs: Sequence[Job], sweep: Path) -> None:
    if len(jobs) < 2:
        return
    rows = run_rows(jobs)
    print_picture(runs_table(rows))
    replace_text(sweep / RUNS_TABLE, runs_csv(rows))
    output_console().print(f"table: {sweep / RUNS_TABLE}", soft_wrap=True)
    if folders := [Path(row.job.folder) for row in rows if row.steps][:_PAGE_RUNS]:
        replace_text(sweep / RUNS_PAGE, run_page(folders))
        output_console().print(f"page: {sweep / RUNS_PAGE}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run of a sweep in the table of all. A figure is None where it is not known."""

    job: Job
    label: str
    """The overrides that not all runs of the sweep share."""
    status: str
    steps: int = 0
    score: float | None = None
    """The last evaluation."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    gpu_hours: float | None = None
    """Hours of the GPUs in use; None on CPUs."""


def run_rows(jobs: Sequence[Job]) -> list[RunRow]:
    """Return the runs of a sweep, the best evaluation first, those without one after them, and failed ones last."""
    rows = [_row(job, label) for job, label in zip(jobs, own_overrides([job.overrides for job in jobs]), strict=True)]
    return sorted(rows, key=lambda row: (row.status == "failed", row.score is None, -(row.score or 0.0)))


def _row(job: Job, label: str) -> RunRow:
    # Imported late, because a dry run does not need it.
    from rlflow.report.records import METRICS, read_lines

    folder = Path(job.folder)
    if job.reason or not (folder / "report.json").exists():
        return RunRow(job=job, label=label, status="failed")
    report, plan = (json.loads((folder / name).read_text("utf-8")) for name in ("report.json", "plan.json"))
    speeds = [line["tokens_per_second"] for line in read_lines(folder / METRICS) if "tokens_per_second" in line]
    return RunRow(
        job=job,
        label=label,
        status=report["status"],
        steps=report["steps"],
        score=report["eval_after"],
        step_seconds=report["step"].get("measured"),
        # The first step loads, compiles and allocates.
        tokens_per_second=median(speeds[1:] or speeds) if speeds else None,
        seconds=report["seconds"],
        gpu_hours=report["seconds"] * plan["num_gpus"] / 3600 if plan["verdict"] else None,
    )


def runs_table(rows: Sequence[RunRow]) -> RenderableType:
    """Return a table of the runs, the first of which is the best, with reasons below it for those that failed."""
    on_gpus = any(row.gpu_hours is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("sweep", "run", "status", "steps", "evaluation", "step", "tokens/s", "time"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "sweep")
    if on_gpus:
        table.add_column("GPU-hours", no_wrap=True)
    for index, row in enumerate(rows):
        is_best = index == 0 and row.score is not None
        table.add_row(
            row.label,
            Path(row.job.folder).name,
            row.status,
            str(row.steps) if row.steps else "-",
            _format(row.score, "{:.3f}") + (" best" if is_best else ""),
            "-" if row.step_seconds is None else format_seconds(row.step_seconds),
            _format(row.tokens_per_second, "{:.0f}"),
            "-" if row.seconds is None else format_duration(row.seconds),
            *([] if not on_gpus else ["-" if row.gpu_hours is None else format_gpu_hours(row.gpu_hours)]),
            style="bold" if is_best else "",
        )
    reasons = [Text(f"{row.label}: {row.job.reason}.") for row in rows if row.job.reason]
    return Group(table, Text(), *reasons) if reasons else table


def runs_csv(rows: Sequence[RunRow]) -> str:
    """Return the runs as comma-separated values, with a column for each key that has different values."""
    settings = [dict(setting.split("=", 1) for setting in row.job.overrides if "=" in setting) for row in rows]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    swept = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["folder", *swept, "status", "steps", "evaluation", "step_seconds", "tokens_per_second", "seconds", "gpu_hours"]
    )
    for row, values in zip(rows, settings, strict=True):
        figures = [row.steps, row.score, row.step_seconds, row.tokens_per_second, row.seconds, row.gpu_hours]
        table.writerow([row.job.folder, *(values.get(key) for key in swept), row.status, *figures])
    return text.getvalue()


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


SWEEP_PAGE = "plans.html"
"""The name of the page in the folder of a sweep."""


def write_sweep_page(outcomes: Sequence[SweepOutcome]) -> Path | None:
    """Write the page of the dry runs of a sweep, and return its path; None without any that has a plan."""
    folders = [outcome.folder for outcome in outcomes if outcome.folder]
    if not folders:
        return None
    directory = Path(os.path.commonpath([folder.parent for folder in folders]))
    replace_text(directory / SWEEP_PAGE, build_page("sweep_page.html", sweep_figures(outcomes, directory)))
    return directory / SWEEP_PAGE


def sweep_figures(outcomes: Sequence[SweepOutcome], directory: Path) -> dict[str, Any]:
    """Return what the page in this folder shows: jobs in the order of their rank, and the reasons of those without."""
    priced = are_priced(outcomes)
    jobs = ranked(outcomes)
    plans = [_plan(label, outcome, directory, priced=priced) for label, outcome in jobs if outcome.plan]
    unit = swept_unit(outcomes)
    shared = set(outcomes[0].overrides).intersection(*(outcome.overrides for outcome in outcomes))
    for plan in plans:
        plan["frontier"] = not any(_is_better(other, plan) for other in plans)
    return {
        "name": ", ".join(dict.fromkeys(outcome.plan.recipe.name for _, outcome in jobs if outcome.plan)),
        # All plans of a page are dry runs.
        "shared": sorted(override for override in shared if not override.startswith("dry_run=")),
        "cost": "price" if priced else f"{unit}-hours",
        "unit": unit,
        "price_unit": PRICE_UNIT,
        "plans": plans,
        "rejected": [{"label": label, "reason": outcome.reason} for label, outcome in jobs if not outcome.plan],
    }


def _plan(label: str, outcome: SweepOutcome, directory: Path, *, priced: bool) -> dict[str, Any]:
    assert outcome.plan is not None
    plan, prediction, cost = outcome.plan, outcome.plan.prediction, outcome.plan.cost
    return {
        "label": label or plan.cluster.shape,
        "page": os.path.relpath(outcome.folder / PAGE, directory) if outcome.folder else None,
        "verdict": prediction.verdict or "PLACED",
        "gpus": sum(len(host.usable) for host in plan.cluster.hosts),
        "used_gpus": prediction.num_gpus,
        "step_seconds": prediction.step_seconds,
        "step": format_range(prediction.step_seconds, prediction.step_seconds_range),
        "hours": cost.hours,
        "run": format_duration(3600 * cost.hours) + (" (late)" if outcome.is_late else ""),
        "gpu_hours": cost.gpu_hours,
        "gpu_hours_text": format_gpu_hours(cost.gpu_hours),
        "price": cost.price,
        "cost": cost.price if priced else cost.gpu_hours,
        "headroom_gib": prediction.headroom_gib,
    }


def _is_better(other: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Return whether another run is at least as short and as cheap, and one of both is less."""
    pairs = [(other[name], plan[name]) for name in ("hours", "cost")]
    return all(theirs <= mine for theirs, mine in pairs) and any(theirs < mine for theirs, mine in pairs)
