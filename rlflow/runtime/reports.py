"""The report of a run, with the measurements beside the predictions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.compiler.plan import Plan
from rlflow.resources.layout import GIB
from rlflow.runtime.base import Report, StoreUse


def report_of(
    plan: Plan,
    directory: Path,
    step: int,
    seconds: float,
    evaluations: Mapping[str, float],
    stored: Mapping[str, Mapping[str, float]],
    warnings: Sequence[str],
    models: Mapping[str, str],
    metrics: Mapping[str, float],
) -> Report:
    """Return what a run ended in."""
    scores, finished = list(evaluations.values()), step == plan.recipe.steps
    return Report(
        name=plan.recipe.name,
        fingerprint=plan.fingerprint,
        status="finished" if finished else "stopped",
        directory=str(directory),
        steps=step,
        seconds=seconds,
        eval_before=scores[0] if scores else None,
        eval_after=scores[-1] if scores and finished else None,
        store=stored,
        warnings=warnings,
        models=models,
        metrics=metrics,
    )


def compared(plan: Plan, use: StoreUse) -> dict[str, dict[str, float]]:
    """Return the MiB of everything in the stores that was both predicted and measured."""
    predicted = plan.prediction.data
    pairs = {name: (size, use.edges[name]) for name, size in predicted.edges.items() if name in use.edges}
    pairs |= {
        f"peak of {host}": (gib * GIB, use.peaks[host])
        for host, gib in predicted.store_peak_gib.items()
        if host in use.peaks
    }
    return {name: {"predicted": a / 2**20, "measured": b / 2**20} for name, (a, b) in pairs.items()}
