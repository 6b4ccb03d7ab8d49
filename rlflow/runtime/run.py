"""The training loop: from a plan to a trained model and its report."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.engines.journal import remove_journal
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError
from rlflow.recipe import Trace, Tune
from rlflow.resources.layout import GIB
from rlflow.runtime.checkpoint import RunProgress, checkpoints, is_checkpoint_due, is_finished
from rlflow.runtime.evaluation import is_evaluation_due
from rlflow.runtime.measurements import StepTimes, compare_memory
from rlflow.runtime.prepare import Training, opened, prepare
from rlflow.runtime.protocols import Observer, Report, Runtime, StoreUse
from rlflow.runtime.recovery import Session
from rlflow.runtime.skipped_steps import SkippedSteps
from rlflow.runtime.step import train_step
from rlflow.system.atomic_folder import write_folder
from rlflow.system.text_files import replace_text

PROFILES = "profiles"
"""The folder of a run in which each profiled step has a folder with a trace of each process with an engine."""


def run(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tune: Tune = False,
    trace: Trace = False,
    profile: Collection[int] = (),
) -> Report:
    """Run ``plan`` in ``directory``; with ``resume`` from the last checkpoint there.

    A run that loses workers goes back to its last checkpoint with new ones; it also does without lost hosts, where
    the recipe is elastic. ``stop`` is called after every step; once it returns True, the run ends with a checkpoint.
    With ``tune``, micro-batches and the number of concurrent sequences start at the plan's values and grow while that
    is faster and memory allows: in the first steps, or with "adaptive" during the whole run. With ``trace``, all steps
    or those with the given numbers are written to ``trace.json``; with ``profile``, engines write traces of torch's
    operations in these steps.

    Raises a UserError for files that are missing, for a plan that cannot run here and for a directory that another run
    uses, and an EngineError when a model or a worker fails.
    """
    with (
        _continuation_noted(directory),
        opened(
            plan,
            directory,
            runtime,
            observers,
            run=run,
            resume=resume,
            stop=stop,
            tune=tune,
            trace=trace,
            profile=profile,
        ) as session,
    ):
        while True:
            try:
                return _train(session)
            except EngineError as error:
                session.recover(error)


def _train(session: Session) -> Report:
    """Train from the last checkpoint to the end of the run."""
    plan, directory, stop = session.plan, session.directory, session.stop
    with prepare(session) as training:
        engines, data, observer, progress = training.engines, training.data, training.observer, training.progress
        metrics: Mapping[str, float] = {}
        times = StepTimes(plan)
        skips = SkippedSteps(plan, directory, engines, observer, progress.skipped)
        training.sync(progress.step)
        while True:
            if training.evaluator and is_evaluation_due(plan, progress):
                start = time.perf_counter()
                measures = training.evaluator.run(engines, data)
                engines.trace.add("evaluation", start, time.perf_counter())
                figure = next(iter(measures.values()))
                progress = progress.evaluated(figure)
                observer.measured(progress.step, measures)
                observer.evaluated(progress.step, figure)
            is_over = stop() or is_finished(plan, progress)
            if is_over or is_checkpoint_due(plan, progress):
                start = time.perf_counter()
                training.checkpoints.save(progress)
                engines.trace.add("checkpoint", start, time.perf_counter())
            if is_over:
                training.checkpoints.wait()
                break
            with _profiled(training, progress.step + 1, session.profile):
                metrics = train_step(
                    training.plan,
                    engines,
                    data,
                    progress.step,
                    observer=observer,
                    start_of_step=training.start_of_step,
                    sync=training.sync,
                    sample_reader=training.sample_reader,
                    skips=skips,
                    work=session.work,
                )
            progress = progress.stepped(plan.recipe.data.batch_size, skips.steps)
            if progress.step not in skips.steps:
                times.add(metrics)
            observer.stepped(progress.step, metrics)
            for warning in engines.take_warnings():
                observer.warned(f"step {progress.step}: {warning}")
            training.checkpoints.check()
        return _finish(session, training, progress, metrics, times)


@contextmanager
def _continuation_noted(directory: Path) -> Iterator[None]:
    """Add to an EngineError how to continue from the last checkpoint, if there is one."""
    try:
        yield
    except EngineError as error:
        if checkpoints(directory):
            error.add_note(f"continue with: rlflow plan={directory}/plan.json resume={directory}")
        raise


@contextmanager
def _profiled(training: Training, step: int, steps: Collection[int]) -> Iterator[None]:
    """Write traces of torch's operations in ``step`` if it is one of ``steps``, for engines that can."""
    roles = training.plan.recipe.roles if step in steps else {}
    engines = [
        training.engines[role] for role in roles if hasattr(engine_kind(roles[role].engine).engine, "start_profile")
    ]
    for engine in engines:
        engine.start_profile()
    yield
    for engine in engines:
        engine.write_profile(training.directory / PROFILES / f"step-{step}")


def _finish(
    session: Session, training: Training, progress: RunProgress, metrics: Mapping[str, float], times: StepTimes
) -> Report:
    """Export the trained models of a run that is finished, and write and return its report.

    ``metrics`` are those of the last step.
    """
    plan, directory = training.plan, training.directory
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
        step=times.step(plan),
        nodes=times.nodes(plan),
        memory=compare_memory(plan, training.engines.peak_bytes()),
        overlap=times.overlap(plan),
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
