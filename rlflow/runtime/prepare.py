"""Everything that opens before the next step: checks, models, data, engines and the graph as it runs."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlflow.compiler import compile_recipe
from rlflow.compiler.checks import check_recorded_steps
from rlflow.compiler.graph import resampled_nodes, without_resampled
from rlflow.compiler.lower import models_in_use, trained_role
from rlflow.compiler.plan import Plan, write_plan
from rlflow.data.encoding import Rows
from rlflow.data.source import DataSource, load_held_out, load_rows, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.journal import open_journal
from rlflow.engines.registry import engine_kind
from rlflow.errors import RecipeError
from rlflow.recipe import Data, Model, Trace, Tune
from rlflow.resources.models.config import check_agreement
from rlflow.runtime.bound_node import bind_nodes, states_of
from rlflow.runtime.checkpoint import CheckpointWriter, RunProgress, checkpoints, remove_unfinished, restore
from rlflow.runtime.evaluation import Evaluator, PausingEvaluator, evaluator_of
from rlflow.runtime.generation.ahead_own_gpus import AheadOnOwnGpus
from rlflow.runtime.generation.ahead_shared_gpus import AheadOnSharedGpus
from rlflow.runtime.generation.resampling import ResamplingRounds
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.observers import Observers
from rlflow.runtime.preflight import check_before_start, check_directory, check_examples, last_checkpoint
from rlflow.runtime.protocols import Engines, Observer, Report, Runtime
from rlflow.runtime.recovery import Session
from rlflow.runtime.samples import SampleReader
from rlflow.runtime.step import StepStart, run_graph, sync_followers
from rlflow.runtime.trace import TraceWriter
from rlflow.runtime.tuning import Tuner
from rlflow.system.atomic_folder import write_folder
from rlflow.system.folder_lock import locked


class Run(Protocol):
    """The function ``run``, which recipes of models need too."""

    def __call__(
        self,
        plan: Plan,
        directory: Path,
        runtime: Runtime,
        observers: Sequence[Observer],
        *,
        resume: bool,
        stop: Callable[[], bool],
    ) -> Report:
        """Run a plan."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run that is ready for its next step."""

    plan: Plan
    """The plan; its graph is the graph as it runs, without the nodes of ``start_of_step``."""
    directory: Path
    engines: Engines
    trained: Mapping[str, Any]
    """The engines of the trained roles."""
    data: DataSource
    start_of_step: StepStart | None
    """The nodes that run in rounds, or ahead of their step."""
    sync: Callable[[int], float]
    """Syncs the weights of a version to the roles that follow, and returns the seconds that it took."""
    sample_reader: SampleReader
    evaluator: Evaluator | None
    checkpoints: CheckpointWriter
    observer: Observer
    """All observers of the run."""
    progress: RunProgress
    """The steps made so far: none, or those of the checkpoint that the run resumes from."""


@contextmanager
def opened(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observers: Sequence[Observer],
    *,
    run: Run,
    resume: bool,
    stop: Callable[[], bool],
    tune: Tune,
    trace: Trace,
    profile: Collection[int],
) -> Iterator[Session]:
    """Check everything, read the data and start the engines; stop them on exit.

    ``run`` trains the models that other recipes make. Raises the errors of ``rlflow.runtime.run.run``.
    """
    observer = Observers(observers)
    check_recorded_steps(plan.recipe.steps, trace, profile)
    if tune and plan.recipe.overlap.max_staleness:
        fact = "compares the times of steps, which overlap.max_staleness lets overlap"
        raise RecipeError("tune", fact, fix="tune=false, or overlap.max_staleness=0")
    check_directory(directory, resume=resume)
    with locked(directory):
        check_before_start(plan, directory, runtime, resume=resume)
        last, progress = last_checkpoint(plan, directory, resume=resume)
        warnings = _warn(observer, last.damaged if last else ())
        remove_unfinished(directory)
        rows = load_rows(plan.recipe.data, "split")
        held_out = load_held_out(plan.recipe.data, plan.recipe.evaluation)

        def train_base(base: Plan, name: str) -> Report:
            write_plan(plan, directory)
            folder = directory / "base" / name
            # The base recipe may need Ray although this plan runs in one process.
            base_runtime = runtime_of(base) if isinstance(runtime, LocalRuntime) else runtime
            return run(base, folder, base_runtime, observers, resume=bool(checkpoints(folder)), stop=stop)

        models = resolve_models(plan, train_base)
        data = _open_data(plan, models, rows, held_out, progress)
        warnings += _warn(observer, data.warnings)
        open_journal(directory, progress.experiment)
        session = Session(
            plan=plan,
            directory=directory,
            runtime=runtime,
            models=models,
            observers=observers,
            stop=stop,
            tune=tune,
            trace=TraceWriter(trace) if trace else None,
            profile=profile,
            last=last,
            progress=progress,
            warnings=warnings,
            data=data,
        )
        with session:
            yield session


@contextmanager
def prepare(session: Session) -> Iterator[Training]:
    """Restore the last checkpoint, and prepare everything for the next step."""
    plan, directory, engines, data = session.plan, session.directory, session.engines, session.data
    observer = Observers(session.observers)
    with ExitStack() as stack:
        trained = {role: engines[role] for role in plan.graph.trained_roles()}
        graph = bind_nodes(plan.graph)
        options = plan.recipe.evaluation
        evaluator = evaluator_of(plan.graph, graph, options, plan.recipe.data.eval_split) if options else None
        rounds = (
            ResamplingRounds(graph, plan.recipe.data.batch_size, data, run_graph) if resampled_nodes(graph) else None
        )
        sync = partial(sync_followers, plan, engines)
        ahead = None
        if plan.recipe.overlap.max_staleness:
            form = AheadOnSharedGpus if plan.takes_turns else AheadOnOwnGpus
            ahead = form(plan.graph, graph, plan.recipe, engines, data, run_graph, sync)
            stack.callback(ahead.close)
            evaluator = evaluator and PausingEvaluator(evaluator, ahead.paused)
        parts = {**trained, **states_of(graph, engines)}
        parts |= {each.path: each for each in (rounds, ahead) if each}
        if session.last:
            restore(session.last, parts)
        if session.tune:
            observer.add(Tuner(engines, adaptive=session.tune == "adaptive"))
        if session.trace:
            session.trace.follow(engines)
            observer.add(session.trace)
        for each in observer.observers:
            each.started(plan, directory, session.progress.step)
            stack.callback(each.close)
        yield Training(
            plan=replace(plan, graph=graph.without(ahead.nodes) if ahead else without_resampled(graph)),
            directory=directory,
            engines=engines,
            trained=trained,
            data=data,
            start_of_step=ahead or rounds,
            sync=ahead.sync if ahead else sync,
            sample_reader=SampleReader(plan.graph, data, plan.recipe.seed),
            evaluator=evaluator,
            checkpoints=stack.enter_context(
                CheckpointWriter(
                    directory, parts, plan.recipe.checkpoints.keep, session.progress.step if session.last else None
                )
            ),
            observer=observer,
            progress=session.progress,
        )


def runtime_of(plan: Plan) -> Runtime:
    """Return the runtime of a plan: this process for one GPU and engines that live in it, else Ray."""
    bundles = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    packages = {engine_kind(role.engine).package for role in plan.recipe.roles.values()}
    if len(bundles) == 1 and packages == {None}:
        return LocalRuntime()
    from rlflow.runtime.ray.runtime import RayRuntime

    return RayRuntime()


def cache_folder() -> Path:
    """Return RLFLOW_CACHE, or ``rlflow`` in the user's cache folder."""
    if given := os.environ.get("RLFLOW_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlflow"


def resolve_models(plan: Plan, train_base: Callable[[Plan, str], Report]) -> dict[str, Model]:
    """Return the recipe's models in use, each with a path or random weights.

    Paths are absolute, since workers start in other directories. ``train_base`` runs the plan of another recipe, for
    the model of that name, where the cache does not have it. Raises RecipeError for a folder whose model has other
    figures than the plan, and KeyboardInterrupt when a base run was stopped.
    """
    models: Mapping[str, Model] = models_in_use(plan.recipe)
    return {name: _resolve(plan, name, model, train_base) for name, model in models.items()}


def _resolve(plan: Plan, name: str, model: Model, train_base: Callable[[Plan, str], Report]) -> Model:
    if model.recipe is None:
        if model.path is not None and model.architecture is not None:
            check_agreement(model.architecture, model.architecture_of, model.path, f"models.{name}")
        folder = Path(os.path.expanduser(model.path or ""))
        return replace(model, path=str(folder.resolve())) if model.path and folder.is_dir() else model
    base = compile_recipe(model.recipe, plan.cluster)
    folder = cache_folder() / f"{model.recipe.name}-{base.fingerprint}"
    if not folder.exists():
        report = train_base(base, name)
        if report.status == "stopped":
            raise KeyboardInterrupt
        exported = report.models[trained_role(model.recipe)]
        write_folder(folder, lambda temporary: shutil.copytree(exported, temporary, dirs_exist_ok=True))
    return replace(model, path=str(folder.resolve()), recipe=None)


def _open_data(
    plan: Plan,
    models: Mapping[str, Model],
    rows: Rows,
    held_out: Mapping[str, tuple[Data, Rows]],
    progress: RunProgress,
) -> DataSource:
    recipe, graph = plan.recipe, plan.graph
    name = recipe.roles[graph.tokenizer_role()].model
    data = open_training_data(
        recipe.data,
        load_tokenizer(name, models[name]),
        rows,
        recipe.seed,
        num_embeddings=architecture.vocab_size if (architecture := models[name].architecture) else None,
        held_out=held_out,
        edge="pairs" if "pairs" in graph.sources else "examples" if "examples" in graph.sources else "prompts",
    )
    check_examples(plan, data)
    return replace(data, resumed_at=(progress.step, progress.rows))


def _warn(observer: Observer, warnings: Sequence[str]) -> list[str]:
    for warning in warnings:
        observer.warned(warning)
    return list(warnings)
