"""The plans of a sweep as a table: the fastest first, or the cheapest of those that meet a deadline."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.plan import Plan, format_duration
from rlflow.report.formats import format_gpu_hours, format_seconds


@dataclass(frozen=True)
class SweepOutcome:
    """The plan of one job of a sweep, or why there is none."""

    overrides: tuple[str, ...]
    plan: Plan | None
    """None if the job does not fit the cluster."""
    deadline_hours: float | None = None
    """The hours in which the run should be finished."""
    reason: str = ""
    """Why it does not fit."""
    folder: Path | None = None
    """The folder with the plan's page; None without a dry run."""

    @property
    def is_late(self) -> bool:
        """Return whether the run misses its deadline."""
        return self.plan is not None and self.deadline_hours is not None and self.plan.cost.hours > self.deadline_hours

    @property
    def objective(self) -> float | None:
        """Return the number by which the plans are ranked: the seconds of a step, or with a deadline the run's cost.

        The cost is the price, or GPU-hours without one. A plan that misses the deadline has no such number.
        """
        if self.plan is None or self.is_late:
            return None
        cost = self.plan.cost
        if self.deadline_hours is None:
            return self.plan.prediction.step_seconds
        return cost.gpu_hours if cost.price is None else cost.price


def ranked(outcomes: Sequence[SweepOutcome]) -> list[tuple[str, SweepOutcome]]:
    """Return the jobs, each with its own overrides, without those that all jobs share.

    The fastest step comes first; with a deadline the cheapest run, and runs that miss it after those that do not. Jobs
    that do not fit come last.
    """
    jobs = sorted(outcomes, key=lambda outcome: (_rank(outcome), outcome.overrides))
    return list(zip(own_overrides([job.overrides for job in jobs]), jobs, strict=True))


def own_overrides(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides of each job in short, without those that all jobs share."""
    everywhere = set(jobs[0]).intersection(*jobs)
    return [", ".join(_short(override) for override in overrides if override not in everywhere) for overrides in jobs]


def are_priced(outcomes: Sequence[SweepOutcome]) -> bool:
    """Return whether every plan has a price."""
    return all(outcome.plan.cost.price is not None for outcome in outcomes if outcome.plan)


def swept_unit(outcomes: Sequence[SweepOutcome]) -> str:
    """Return the name of the devices of all plans: CPU if none of them has a GPU."""
    return "CPU" if {outcome.plan.unit for outcome in outcomes if outcome.plan} == {"CPU"} else "GPU"


def ranking_table(outcomes: Sequence[SweepOutcome]) -> RenderableType:
    """Return a table of the jobs in the order of their rank, with reasons below it for those that do not fit."""
    priced = are_priced(outcomes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    money = ["price"] if priced else []
    unit = swept_unit(outcomes)
    for heading in ("sweep", "fits", "step", f"tokens/s\nper {unit}", "run", f"{unit}-hours", *money, "headroom"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "sweep")
    reasons: list[Text] = []
    for label, outcome in ranked(outcomes):
        if outcome.plan is None:
            table.add_row(label, "no")
            reasons.append(Text(f"{label}: {outcome.reason}."))
            continue
        prediction, cost = outcome.plan.prediction, outcome.plan.cost
        table.add_row(
            label,
            "tight" if prediction.verdict == "TIGHT" else "yes",
            format_seconds(prediction.step_seconds),
            f"{prediction.tokens_per_second_per_gpu:.0f}",
            format_duration(3600 * cost.hours) + (" (late)" if outcome.is_late else ""),
            format_gpu_hours(cost.gpu_hours),
            *([f"{cost.price:.2f}"] if priced else []),
            f"{prediction.headroom_gib:.1f} GiB" if prediction.headroom_gib is not None else "-",
        )
    return Group(table, Text(), *reasons) if reasons else table


def _rank(outcome: SweepOutcome) -> tuple[int, float, float]:
    """Return the place of a job in the table, the smallest first."""
    if outcome.plan is None:
        return 2, 0.0, 0.0
    hours = outcome.plan.cost.hours
    return (1, hours, 0.0) if outcome.objective is None else (0, outcome.objective, hours)


def _short(override: str) -> str:
    """Return an override with the last part of its key, and of the path to a recipe; long numbers have four digits."""
    key, _, value = override.partition("=")
    if re.fullmatch(r"\d+\.\d{4,}(e[+-]?\d+)?", value):
        value = f"{float(value):.4g}"
    return f"{key.rpartition('.')[2]}={value.strip(chr(39)).rpartition('/')[2]}"
