"""Predict memory and time of a table of published runs, and compare them with what their authors measured.

python -m benchmarks.published TABLE.csv [--json FILE] [--worst COUNT]

The table's columns are those of ``rows.Row``. No row gets special treatment: predictions follow from architectures and
GPUs of conf, from rlflow's own formulas, and from known behaviour of libraries (``libraries.py``, ``steps.py``).
benchmarks/RESULTS.md lists the constants that were chosen with published rows in sight.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.published import boundaries, leave_one_out, memory, time_folds, times
from benchmarks.published.cases import cases
from benchmarks.published.rows import Row, read
from benchmarks.reporting import Goal, finish

Figures = Mapping[str, float | int | None]
AT_LEAST = {
    "rows_used": 950,
    "oom_recall": 0.9,
    "kendall_tau_median": 0.8,
    "loo_oom_recall": 0.92,
    "loo_oom_recall_worst": 0.8,
    "step_time_in_range": 0.85,
}
AT_MOST = {
    "false_oom_rate": 0.02,
    "boundary_error_max": 0.1,
    "memory_error_median": 0.15,
    "step_time_error_median": 0.35,
    "loo_step_time_error_median": 0.18,
    "loo_step_time_error_one_constant": 0.2,
    "loo_false_oom": 0.015,
    "loo_false_oom_worst": 0.07,
    "loo_boundary_error_max": 0.15,
    "loo_memory_error_median": 0.08,
    "loo_memory_error_agilerl": 0.05,
    "tight_of_working_verl": 0.33,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worst", type=int, default=8, help="number of rows to print for each kind of error")
    arguments = parser.parse_args()
    rows = read(arguments.table)
    made, unusable = cases(rows)
    fits, no_memory = memory.judge(made)
    steps, no_time = times.judge(made)
    reasons = {skipped.row.id: skipped.reason for skipped in unusable} | no_memory
    used = {one.case.row.id for one in fits} | {one.case.row.id for one in steps}
    skipped = {row.id: reasons[row.id] for row in rows if row.id not in used}
    found = list(boundaries.boundaries(rows))
    folds, errors = leave_one_out.folds(made)
    figures = _counts(rows, skipped) | memory.figures(fits) | boundaries.figures(found) | times.figures(steps)
    figures |= leave_one_out.figures(folds, leave_one_out.searched_boundaries(rows, folds))
    time_errors = time_folds.folds(steps)
    figures |= time_folds.figures(time_errors[0])
    figures["tight_of_working_verl"] = next((fold.tight for fold in folds if fold.system == "verl"), None)
    systems = {}
    for system in sorted({row.system for row in rows}):
        mine = [one for one in fits if one.case.row.system == system]
        systems[system] = _counts([row for row in rows if row.system == system], skipped)
        systems[system] |= memory.figures(mine) | boundaries.figures([one for one in found if one.system == system])
        systems[system] |= times.by_system(steps).get(system, {})
    console = Console(width=160)
    _print(console, figures, systems)
    leave_one_out.write(console, folds, errors)
    time_folds.write(console, *time_errors)
    for reason, count in Counter(skipped.values()).most_common():
        console.print(f"skipped {count:4}  {reason}", highlight=False)
    sees = {case.row.id for case in made if case.model.num_encoder_parameters}
    for reason, count in Counter(why for row, why in no_time.items() if row in sees).most_common():
        console.print(f"time of a model that reads images not judged {count:4}  {reason}", highlight=False)
    for boundary in found:
        console.print(boundaries.line(boundary), highlight=False)
    for kind, judged in memory.worst(fits).items():
        console.print(f"\n{kind}: {len(judged)}", highlight=False)
        for one in judged[: arguments.worst]:
            console.print(f"  {memory.line(one)}", highlight=False, soft_wrap=True)
    console.print("\nstep times", highlight=False)
    for time in times.worst(steps, arguments.worst):
        console.print(f"  {times.line(time)}", highlight=False, soft_wrap=True)
    if arguments.json is not None:
        reports = {"figures": figures, "systems": systems, "skipped": dict(Counter(skipped.values()).most_common())}
        arguments.json.write_text(json.dumps(reports, indent=1))
    known = {name: value for name in (*AT_LEAST, *AT_MOST) if (value := figures[name]) is not None}
    return finish("published", known, {name: _goal(name, value) for name, value in known.items()}, None)


def _goal(name: str, value: float) -> Goal:
    if name in AT_LEAST:
        return Goal(f"at least {AT_LEAST[name]}", value >= AT_LEAST[name])
    return Goal(f"at most {AT_MOST[name]}", value <= AT_MOST[name])


def _counts(rows: Sequence[Row], skipped: Mapping[str, str]) -> dict[str, float | int | None]:
    out = sum(row.id in skipped for row in rows)
    return {"rows_used": len(rows) - out, "rows_skipped": out}


def _print(console: Console, figures: Figures, systems: Mapping[str, Figures]) -> None:
    table = Table("figure", "all", *systems)
    for name in figures:
        table.add_row(name, *(_text(part.get(name)) for part in (figures, *systems.values())))
    console.print(table)


def _text(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
