"""The plans of a sweep as a page: step time and cost against the size of the cluster, and what does not fit."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import format_duration
from rlflow.report.formats import PRICE_UNIT, format_gpu_hours, format_range
from rlflow.report.page import build_page
from rlflow.report.plan_page import PAGE
from rlflow.report.ranking import SweepOutcome, are_priced, ranked, swept_unit
from rlflow.system.text_files import replace_text

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
