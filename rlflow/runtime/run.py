"""The training loop: from a plan to a trained model and its report."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlflow.compiler.checks import check_run
from rlflow.compiler.models import may_see_images
from rlflow.compiler.plan import Plan, write_plan
from rlflow.data.loading import load_held_out, load_rows
from rlflow.engines.journal import open_journal
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError
from rlflow.recipe.options import RunOptions
from rlflow.runtime.alarms import Alarms
from rlflow.runtime.checkpoint import (
    CheckpointWriter,
    checkpoints,
    is_checkpoint_due,
    is_finished,
    remove_unfinished,
    restore,
)
from rlflow.runtime.evaluation import is_evaluation_due
from rlflow.runtime.finish import finish
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.measurements import StepTimes
from rlflow.runtime.observers import Observers
from rlflow.runtime.preflight import check_before_start, check_directory, last_checkpoint, with_data
from rlflow.runtime.prepare import open_data, resolve_models, runtime_of
from rlflow.runtime.protocols import Observer, Report, Runtime
from rlflow.runtime.recovery import recover
from rlflow.runtime.samples import SampleReader
from rlflow.runtime.session import Session
from rlflow.runtime.skipped_steps import SkippedSteps
from rlflow.runtime.step import train_step
from rlflow.runtime.trace import TraceWriter
from rlflow.runtime.training import Training
from rlflow.runtime.tuning import Tuner
from rlflow.system.folder_lock import locked

_DEFAULT_OPTIONS = RunOptions()
PROFILES = "profiles"
"""The folder of a run in which each profiled step has a folder with a trace of each process with an engine."""


def run(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observers: Sequence[Observer] = (),
    options: RunOptions = _DEFAULT_OPTIONS,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Run ``plan`` in ``directory``; with ``resume`` from the last checkpoint there.

    ``stop`` is called after every step; once it returns True, the run ends with a checkpoint. A run that loses workers
    goes back to its last checkpoint with new ones; it also does without lost hosts, where the recipe is elastic.

    Raises a UserError for files that are missing, for a plan that cannot run here and for a directory that another run
    uses, and an EngineError when a model or a worker fails.
    """
    with (
        _continuation_noted(directory),
        _opened(plan, directory, runtime, Observers(observers), options, resume=resume, stop=stop) as session,
    ):
        while True:
            try:
                return _train(session)
            except EngineError as error:
                recover(session, error)


@contextmanager
def _opened(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observer: Observers,
    options: RunOptions,
    *,
    resume: bool,
    stop: Callable[[], bool],
) -> Iterator[Session]:
    """Check everything, read the data and start the engines; stop them on exit."""
    check_run(plan.recipe, options)
    check_directory(directory, resume=resume)
    with locked(directory):
        check_before_start(plan, directory, runtime, resume=resume)
        last, progress = last_checkpoint(plan, directory, resume=resume)
        warnings = _warn(observer, last.damaged if last else ())
        remove_unfinished(directory)
        recipe, sees_images = plan.recipe, may_see_images(plan.recipe, plan.graph)
        rows = load_rows(recipe.data, "split", sees_images=sees_images)
        held_out = load_held_out(recipe.data, recipe.evaluation, sees_images=sees_images)
        progress = with_data(progress, rows, directory)

        def train_base(base: Plan, name: str) -> Report:
            write_plan(plan, directory)
            folder = directory / "base" / name
            # The base recipe may need Ray although this plan runs in one process.
            base_runtime = runtime_of(base) if isinstance(runtime, LocalRuntime) else runtime
            return run(base, folder, base_runtime, observer.observers, resume=bool(checkpoints(folder)), stop=stop)

        models = resolve_models(plan, train_base)
        data = open_data(plan, models, rows, held_out, progress)
        warnings += _warn(observer, data.warnings)
        open_journal(directory, progress.experiment)
        session = Session(
            plan=plan,
            directory=directory,
            runtime=runtime,
            observer=observer,
            options=options,
            stop=stop,
            models=models,
            local_data=data,
            last=last,
            progress=progress,
            warnings=warnings,
            trace=TraceWriter(options.trace) if options.trace else None,
        )
        with session.running:
            session.start()
            yield session


def _warn(observer: Observer, warnings: Sequence[str]) -> list[str]:
    for warning in warnings:
        observer.warned(warning)
    return list(warnings)


def _train(session: Session) -> Report:
    """Train from the last checkpoint to the end of the run."""
    plan, engines, stop, progress = session.plan, session.engines, session.stop, session.progress
    with _prepared(session) as (training, skips, writer):
        observer = training.observer
        metrics: Mapping[str, float] = {}
        times, alarms = StepTimes(plan), Alarms(plan.graph)
        training.sync(progress.step)
        while True:
            if training.evaluator and is_evaluation_due(plan, progress):
                start = time.perf_counter()
                measures = training.evaluator.run(training.data)
                engines.trace.add("evaluation", start, time.perf_counter())
                figure = next(iter(measures.values()))
                progress = progress.evaluated(figure)
                observer.measured(progress.step, measures)
                observer.evaluated(progress.step, figure)
            is_over = stop() or is_finished(plan, progress)
            if is_over or is_checkpoint_due(plan, progress):
                start = time.perf_counter()
                writer.save(progress)
                engines.trace.add("checkpoint", start, time.perf_counter())
            if is_over:
                writer.wait()
                break
            with _profiled(session, progress.step + 1):
                metrics = train_step(training, progress.step)
            progress = progress.stepped(plan.recipe.data.batch_size, skips.steps)
            if progress.step not in skips.steps:
                times.add(metrics)
            observer.stepped(progress.step, metrics)
            for warning in engines.take_warnings():
                observer.warned(f"step {progress.step}: {warning}")
            session.warn(*alarms.warnings(progress.step, metrics))
            writer.check()
        return finish(session, training, progress, times, metrics)


@contextmanager
def _prepared(session: Session) -> Iterator[tuple[Training, SkippedSteps, CheckpointWriter]]:
    """Prepare the next step: restore the last checkpoint, and start the observers."""
    plan, directory, engines, tune = session.plan, session.directory, session.engines, session.options.tune
    observer, step = Observers(session.observer.observers), session.progress.step
    skips = SkippedSteps(plan, directory, engines, observer, session.progress.skipped)
    training = replace(
        Training.of(plan, engines, session.data),
        observer=observer,
        samples=SampleReader(plan.graph, session.data, plan.recipe.seed),
        skips=skips,
        work=session.work,
    )
    with ExitStack() as stack:
        if training.start_of_step is not None:
            stack.callback(training.start_of_step.close)
        if session.last:
            restore(session.last, training.saved)
        if tune:
            observer.add(Tuner(engines, adaptive=tune == "adaptive"))
        if session.trace:
            session.trace.follow(engines)
            observer.add(session.trace)
        for watcher in observer.observers:
            watcher.started(plan, directory, step)
            stack.callback(watcher.close)
        saved_step = step if session.last else None
        writer = CheckpointWriter(directory, training.saved, plan.recipe.checkpoints.keep, saved_step)
        yield training, skips, stack.enter_context(writer)


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
def _profiled(session: Session, step: int) -> Iterator[None]:
    """Write traces of torch's operations in ``step`` if it is profiled, for engines that support it."""
    roles = session.plan.recipe.roles if step in session.options.profile else {}
    engines = [
        session.engines[role] for role in roles if hasattr(engine_kind(roles[role].engine).engine, "start_profile")
    ]
    for engine in engines:
        engine.start_profile()
    yield
    for engine in engines:
        engine.write_profile(session.directory / PROFILES / f"step-{step}")
