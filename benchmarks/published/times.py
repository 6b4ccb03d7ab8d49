"""Compare predicted step times with those that others measured: their error, and their order."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from statistics import mean, median

from benchmarks.published import deepspeed_chat, steps
from benchmarks.published.cases import Case, case_of
from benchmarks.published.steps import Step
from rlflow.resources.time.speed import Efficiency

# Measured times that differ by less count as equal: repeated runs of one configuration differ by this much.
_NOISE = 0.05
_FEWEST = 3


@dataclass(frozen=True)
class Judged:
    case: Case
    step: Step
    measured: float
    is_bound: bool
    """True if ``measured`` is only an upper bound."""

    @property
    def error(self) -> float:
        """Return the relative error with its sign."""
        return self.step.seconds / self.measured - 1

    @property
    def correction(self) -> float:
        return log(self.measured / self.step.seconds)

    @property
    def kind(self) -> str:
        return re.split(r"[-_ ]", self.case.row.gpu_type.upper())[0]

    @property
    def table(self) -> tuple[str, str, str]:
        row = self.case.row
        return row.system, row.source_path, row.gpu_type


def judge(cases: Iterable[Case], efficiency: Efficiency | None = None) -> tuple[list[Judged], dict[str, str]]:
    """Return the cases whose step time can be predicted, and the reasons why others cannot, by id."""
    judged, skipped = [], {}
    for case in cases:
        row = case.row
        if row.step_time_s is None:
            continue
        if row.rollout_engine and row.placement not in ("colocate", "disaggregate"):
            # Every call uses all GPUs, one after another, as with colocated roles.
            again = case_of(replace(row, placement="colocate"))
            case = again if isinstance(again, Case) else case
        reason = steps.unfit(case)
        if reason:
            skipped[row.id] = reason
            continue
        measured = row.step_time_s
        if steps.has_unknown_rounds(row):
            if row.train_time_s is None:
                skipped[row.id] = "the number of sampling rounds is not given"
                continue
            measured = row.train_time_s
        judged.append(Judged(case, predict(case, efficiency), measured, "bound" in row.step_time_kind))
    return judged, skipped


def predict(case: Case, efficiency: Efficiency | None = None) -> Step:
    """Predict the step, or its update alone if the number of sampling rounds is not given."""
    if deepspeed_chat.is_hybrid(case):
        return deepspeed_chat.predict(case, efficiency)
    step = steps.predict(case, efficiency)
    return replace(step, parts={"training": step.parts["training"]}) if steps.has_unknown_rounds(case.row) else step


def figures(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    """Return the figures as shares, not percent. Rows that are bounds count only as kept or not."""
    rows = [one for one in judged if not one.is_bound]
    bounds = [one for one in judged if one.is_bound]
    errors = [abs(one.error) for one in rows]
    calibrated = [abs(error) for error in calibrated_errors(rows).values()]
    taus = [tau for _, tau in taus_of(rows)]
    return {
        "step_time_error_median": median(errors) if errors else None,
        "step_time_error_mean": mean(errors) if errors else None,
        "step_time_error_median_calibrated": median(calibrated) if calibrated else None,
        "step_time_error_mean_calibrated": mean(calibrated) if calibrated else None,
        "kendall_tau_median": median(taus) if taus else None,
        "kendall_tau_tables": len(taus),
        "step_time_rows": len(rows),
        "step_time_bounds_kept": sum(one.error <= 0 for one in bounds) / len(bounds) if bounds else None,
        "step_time_bounds": len(bounds),
    }


def by_system(judged: Sequence[Judged]) -> dict[str, dict[str, float | int | None]]:
    """Return the figures of each system, calibrated on all other systems."""
    rows = [one for one in judged if not one.is_bound]
    calibrated = calibrated_errors(rows)
    found = {}
    for system in sorted({one.case.row.system for one in judged}):
        mine = [one for one in judged if one.case.row.system == system]
        found[system] = figures(mine)
        errors = [abs(calibrated[one.case.row.id]) for one in mine if not one.is_bound]
        found[system]["step_time_error_median_calibrated"] = median(errors) if errors else None
        found[system]["step_time_error_mean_calibrated"] = mean(errors) if errors else None
    return found


def calibrated_errors(rows: Sequence[Judged]) -> dict[str, float]:
    """Return signed errors by id after calibration with one factor per kind of GPU.

    The factor is fitted on other systems' runs on that kind of GPU or, if there are too few, on all their runs.
    """
    errors = {}
    for one in rows:
        others = [other for other in rows if other.case.row.system != one.case.row.system]
        like = [other.correction for other in others if other.kind == one.kind]
        fitted = like if len(like) >= _FEWEST else [other.correction for other in others]
        factor = exp(median(fitted)) if fitted else 1.0
        errors[one.case.row.id] = factor * one.step.seconds / one.measured - 1
    return errors


def taus_of(rows: Sequence[Judged]) -> list[tuple[tuple[str, str, str], float]]:
    """Return Kendall's tau of every table with at least three rows: one system, one source, one kind of GPU."""
    found = []
    for table in sorted({one.table for one in rows}):
        mine = [one for one in rows if one.table == table]
        tau = kendall(mine, lambda one: one.measured, lambda one: one.step.seconds)
        if len(mine) >= _FEWEST and tau is not None:
            found.append((table, tau))
    return found


def kendall(
    rows: Sequence[Judged], truth: Callable[[Judged], float], predicted: Callable[[Judged], float]
) -> float | None:
    """Return concordant minus discordant pairs, relative to all pairs that differ by more than noise."""
    signs = []
    for one, other in combinations(rows, 2):
        gap = log(truth(one) / truth(other))
        if abs(gap) > _NOISE:
            signs.append((1 if gap > 0 else -1) * _sign(predicted(one) - predicted(other)))
    return sum(signs) / len(signs) if len(signs) >= _FEWEST else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def worst(judged: Sequence[Judged], count: int = 12) -> list[Judged]:
    rows = [one for one in judged if not one.is_bound]
    return sorted(rows, key=lambda one: -abs(one.correction))[:count]


def line(one: Judged) -> str:
    """Return a row's prediction with its parts as text."""
    row = one.case.row
    parts: Mapping[str, float] = one.step.parts
    made_of = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds)
    times = f" x {one.step.repeated:.0f}" if one.step.repeated != 1 else ""
    return (
        f"{row.id} {row.system} {row.model} {row.n_gpus}x{row.gpu_type}: {one.step.seconds:.1f} s for"
        f" {one.measured:.1f} ({one.error:+.0%}) = {made_of}{times}"
    )
