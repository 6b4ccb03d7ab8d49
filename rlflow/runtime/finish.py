"""The end of a run: its trained models, and its report with measurements beside predictions."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.resources.layout import GIB
from rlflow.runtime.checkpoint import RunProgress, write_folder
from rlflow.runtime.prepare import Training
from rlflow.runtime.protocols import Report, StoreUse


def finish(training: Training, progress: RunProgress, metrics: Mapping[str, float]) -> Report:
    """Export the trained models of a run that made all its steps, and write and return its report.

    ``metrics`` are those of the last step.
    """
    plan, directory = training.plan, training.directory
    is_finished = progress.step == plan.recipe.steps
    models = export_models(directory, training.trained) if is_finished else {}
    measures = list(progress.evaluations.values())
    report = Report(
        name=plan.recipe.name,
        fingerprint=plan.fingerprint,
        status="finished" if is_finished else "stopped",
        directory=str(directory),
        steps=progress.step,
        seconds=time.perf_counter() - training.started_at,
        eval_before=measures[0] if measures else None,
        eval_after=measures[-1] if measures and is_finished else None,
        store=compare_store_use(plan, training.engines.store_use()),
        warnings=training.warnings,
        models=models,
        metrics=metrics,
    )
    (directory / "report.json").write_text(json.dumps(asdict(report), indent=1))
    training.observer.ended(report)
    return report


def export_models(directory: Path, trained: Mapping[str, Any]) -> dict[str, str]:
    """Write the model of each trained role, and return the folders."""
    folders = {role: directory / "model" / role for role in trained}
    for role, folder in folders.items():
        # A resumed run may have exported a model before, after fewer steps.
        write_folder(folder, trained[role].export, replaces=True)
    return {role: str(folder) for role, folder in folders.items()}


def compare_store_use(plan: Plan, use: StoreUse) -> dict[str, dict[str, float]]:
    """Return the predicted and the measured MiB of everything in the object stores for which both are known."""
    predicted = plan.prediction.data
    pairs = {name: (size, use.edges[name]) for name, size in predicted.edges.items() if name in use.edges}
    pairs |= {
        f"peak of {host}": (gib * GIB, use.peaks[host])
        for host, gib in predicted.store_peak_gib.items()
        if host in use.peaks
    }
    return {name: {"predicted": a / 2**20, "measured": b / 2**20} for name, (a, b) in pairs.items()}
