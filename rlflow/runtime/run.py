"""The training loop: from a plan to a trained model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlflow.compiler.plan import Plan
from rlflow.recipe import Tune
from rlflow.runtime.checkpoint import is_checkpoint_due
from rlflow.runtime.evaluation import is_evaluation_due
from rlflow.runtime.finish import finish
from rlflow.runtime.prepare import prepare
from rlflow.runtime.protocols import Observer, Report, Runtime
from rlflow.runtime.step import copy_weights, train_step


def run(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tune: Tune = False,
) -> Report:
    """Run ``plan`` in ``directory``; with ``resume`` from the last checkpoint there.

    ``stop`` is called after every step; once it returns True, the run ends with a checkpoint. With ``tune``,
    micro-batches and the number of concurrent sequences start at the plan's values and grow while that is faster and
    memory allows: in the first steps, or with "adaptive" during the whole run.

    Raises a UserError for files that are missing, for a plan that cannot run here and for a directory that another run
    uses, and an EngineError when a model or a worker fails.
    """
    with prepare(plan, directory, runtime, observers, run=run, resume=resume, stop=stop, tune=tune) as training:
        engines, data, observer, progress = training.engines, training.data, training.observer, training.progress
        metrics: Mapping[str, float] = {}
        copy_weights(plan, engines, version=progress.step)
        while True:
            if training.evaluator and is_evaluation_due(plan, progress):
                measure = training.evaluator.run(engines, data)
                progress = progress.evaluated(measure)
                observer.evaluated(progress.step, measure)
            is_over = stop() or progress.step == plan.recipe.steps
            if is_over or is_checkpoint_due(plan, progress):
                training.checkpoints.save(progress)
            if is_over:
                break
            metrics = train_step(training.plan, engines, data, progress.step, observer, training.rounds)
            progress = progress.stepped(plan.recipe.data.batch_size)
            observer.stepped(progress.step, metrics)
        return finish(training, progress, metrics)
