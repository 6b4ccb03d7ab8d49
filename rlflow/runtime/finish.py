"""The end of a run: its models and its report."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.engines.journal import remove_journal
from rlflow.resources.layout import GIB
from rlflow.runtime.checkpoint import RunProgress, is_finished
from rlflow.runtime.measurements import StepTimes, compare_memory
from rlflow.runtime.protocols import Report, StoreUse
from rlflow.runtime.session import Session
from rlflow.runtime.training import Training
from rlflow.system.atomic_folder import write_folder
from rlflow.system.text_files import replace_text


def finish(
    session: Session, training: Training, progress: RunProgress, times: StepTimes, metrics: Mapping[str, float]
) -> Report:
    """Export the trained models of a run that is finished, and write and return its report.

    ``metrics`` are those of the last step.
    """
    plan, directory = session.plan, session.directory
    ended = is_finished(plan, progress)
    models = _export_models(directory, training.trained) if ended else {}
    if ended:
        remove_journal(directory)
    measures = list(progress.evaluations.values())
    report = Report(
        name=plan.recipe.name,
        fingerprint=plan.fingerprint,
        status="finished" if ended else "stopped",
        directory=str(directory),
        steps=progress.step,
        seconds=time.perf_counter() - session.started_at,
        eval_before=measures[0] if measures else None,
        eval_after=measures[-1] if measures and ended else None,
        restarts=session.restarts,
        step=times.step(),
        nodes=times.nodes(),
        memory=compare_memory(plan, training.engines.peak_bytes()),
        overlap=times.overlap(),
        store=_compare_store_use(plan, training.engines.store_use()),
        warnings=[*session.warnings, *_skipped_warning(progress)],
        models=models,
        metrics=metrics,
    )
    replace_text(directory / "report.json", json.dumps(asdict(report), indent=1))
    training.observer.ended(report)
    return report


def _skipped_warning(progress: RunProgress) -> list[str]:
    if not progress.skipped:
        return []
    steps = ", ".join(map(str, progress.skipped))
    return [f"{len(progress.skipped)} of {progress.step} steps were skipped for values that are not finite: {steps}"]


def _export_models(directory: Path, trained: Mapping[str, Any]) -> dict[str, str]:
    """Write the model of each trained role, and return the folders."""
    folders = {role: directory / "model" / role for role in trained}
    for role, folder in folders.items():
        # A resumed run may have exported a model before, after fewer steps.
        write_folder(folder, trained[role].export, replaces=True)
    return {role: str(folder) for role, folder in folders.items()}


def _compare_store_use(plan: Plan, use: StoreUse) -> dict[str, dict[str, float]]:
    """Return the predicted and the measured MiB of everything in the object stores for which both are known."""
    predicted = plan.prediction.data
    pairs = {name: (size, use.edges[name]) for name, size in predicted.edges.items() if name in use.edges}
    pairs |= {
        f"peak of {host}": (gib * GIB, use.peaks[host])
        for host, gib in predicted.store_peak_gib.items()
        if host in use.peaks
    }
    return {name: {"predicted": a / 2**20, "measured": b / 2**20} for name, (a, b) in pairs.items()}
