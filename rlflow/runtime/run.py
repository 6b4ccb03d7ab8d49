"""run: from a plan to a trained model."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlflow.batch import Sequences
from rlflow.compiler.checks import check_reward_folders
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.graph import resampled_nodes, without_resampled
from rlflow.compiler.plan import Plan, write_plan
from rlflow.data.encoding import Rows
from rlflow.data.source import DataSource, load_rows, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.generate import Converse
from rlflow.nodes.reward import Reward
from rlflow.recipe import Model, Tune
from rlflow.runtime import checkpoint
from rlflow.runtime.adaptation import adaptive
from rlflow.runtime.evaluation import pair_evaluator
from rlflow.runtime.folder_lock import locked
from rlflow.runtime.generation.conversing import conversing
from rlflow.runtime.generation.overcommit import begun_ahead, overcommitted
from rlflow.runtime.generation.resampling import Rounds
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.preflight import check_examples, check_vocabularies
from rlflow.runtime.prepare import resolve_models, runtime_of
from rlflow.runtime.protocols import Engines, Observer, Report, Runtime, compared, report_of
from rlflow.runtime.step import evaluator, reasons_of, run_graph, summary
from rlflow.runtime.tuning import Tuner, with_places


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
    """Runs ``plan`` in ``directory``; with ``resume`` from the last checkpoint there.

    ``tune``: in the first steps, or with "adaptive" as long as it runs, micro-batches and the sequences that an engine
    writes at once grow as long as that is faster and memory allows, from those of the plan, with ``resume`` too.
    ``stop`` is asked after every step; when it says so, the run ends with a checkpoint. Raises a UserError
    for what the recipe names and is not there, for a plan that cannot be run here and for a folder that another run
    uses, EngineError for what fails.
    """
    if resume and not directory.is_dir():
        raise _no_checkpoint(directory)
    with locked(directory):
        return _run(plan, directory, runtime, observers, resume, stop, tune)


def _run(
    plan: Plan,
    directory: Path,
    runtime: Runtime,
    observers: Sequence[Observer],
    resume: bool,
    stop: Callable[[], bool],
    tune: Tune,
) -> Report:
    """Run in a folder that no other run uses."""
    if not resume and checkpoint.checkpoints(directory):
        raise RecipeError("resume", f"'{directory}' holds a run already", fix=f"resume={directory}, or another folder")
    runtime.check(plan)
    check_vocabularies(plan)
    check_reward_folders(plan.recipe, plan.graph)
    for node in plan.graph.nodes:
        if isinstance(node.operation, Reward | Converse):
            node.operation.try_out()
    experiment = experiment_of(plan.recipe)
    last = checkpoint.last(directory, experiment) if resume else None
    if resume and not last and not (directory / "base").is_dir():
        raise _no_checkpoint(directory)
    warnings = list(last.damaged) if last else []
    _warn(observers, warnings)
    checkpoint.remove_unfinished(directory)
    behind = last.progress if last else checkpoint.Progress(experiment, 0, 0, {})
    _check_steps(plan, behind.step)
    rows, held_out = load_rows(plan.recipe.data, "split"), _held_out_rows(plan)

    def run_base(base: Plan, name: str) -> Report:
        write_plan(plan, directory)
        folder = directory / "base" / name
        # It may need what this process alone does not have; what runs anything runs it too.
        on = runtime_of(base) if isinstance(runtime, LocalRuntime) else runtime
        return run(base, folder, on, observers, resume=bool(checkpoint.checkpoints(folder)), stop=stop)

    models = resolve_models(plan, run_base)
    data = _open_data(plan, models, rows, held_out, behind)
    _warn(observers, data.warnings)
    warnings += data.warnings
    write_plan(plan, directory)
    began = time.perf_counter()
    with ExitStack() as open_parts:
        engines = open_parts.enter_context(runtime.start(with_places(plan) if tune else plan, models, directory))
        data = engines.hosted(data)
        trained = {role: engines[role] for role in plan.graph.trained_roles()}
        graph = conversing(plan.graph, plan.recipe.roles, models, engines)
        evaluation = (pair_evaluator(plan.graph) or evaluator(plan.graph, graph)) if held_out else None
        graph, overcommits = overcommitted(graph, plan.recipe.data.batch_size, data)
        graph, adaptations = adaptive(graph, engines)
        rounds = Rounds(graph, plan.recipe.data.batch_size, data) if resampled_nodes(graph) else None
        training, kept = replace(plan, graph=without_resampled(graph)), {**trained, **overcommits, **adaptations}
        if rounds:
            kept[rounds.path] = rounds
        if last:
            checkpoint.restore(last, kept)
        if tune:
            observers = (*observers, Tuner(engines, adaptive=tune == "adaptive"))
        for observer in observers:
            observer.started(plan, directory, behind.step)
            open_parts.callback(observer.close)
        steps, options = plan.recipe.steps, plan.recipe.checkpoints
        step, evaluations, saved = behind.step, dict(behind.evaluations), behind.step if last else None
        metrics: Mapping[str, float] = {}
        _copy_weights(plan, engines, version=step)
        while True:
            if evaluation and _is_due(plan, step) and str(step) not in evaluations:
                evaluations[str(step)] = evaluation.run(engines, data)
                for observer in observers:
                    observer.evaluated(step, evaluations[str(step)])
            stopped = stop()
            if step != saved and (stopped or step == steps or (step > 0 and step % options.every == 0)):
                taken = behind.rows + (step - behind.step) * plan.recipe.data.batch_size
                done = checkpoint.Progress(experiment, step, taken, evaluations)
                checkpoint.save(directory, done, kept, options.keep)
            if stopped or step == steps:
                break
            in_force = {
                f"{path.removeprefix('graph.')}/kl_coef": each.coefficient() for path, each in adaptations.items()
            }
            metrics = train_step(training, engines, data, step, observers, rounds) | in_force
            step += 1
            for observer in observers:
                observer.stepped(step, metrics)
        exported = _export(directory, trained) if step == steps else {}
        stored = compared(plan, engines.store_use())
        seconds = time.perf_counter() - began
        report = report_of(plan, directory, step, seconds, evaluations, stored, warnings, exported, metrics)
        (directory / "report.json").write_text(json.dumps(asdict(report), indent=1))
        for observer in observers:
            observer.ended(report)
    return report


def _warn(observers: Sequence[Observer], warnings: Sequence[str]) -> None:
    for warning in warnings:
        for observer in observers:
            observer.warned(warning)


def _no_checkpoint(directory: Path) -> RecipeError:
    return RecipeError("resume", f"'{directory}' has no checkpoint", fix="run it anew, without resume")


def train_step(
    plan: Plan,
    engines: Engines,
    data: DataSource,
    step: int,
    observers: Sequence[Observer] = (),
    rounds: Rounds | None = None,
) -> dict[str, float]:
    """One pass over the graph, after ``rounds`` where it has any, and the weights to those that follow. Times are named
    ``seconds`` or ``per_second``. ``observers`` are told what could not be judged."""
    began = time.perf_counter()
    metrics: dict[str, float] = {}
    tokens = 0

    def made(name: str, output: Any) -> None:
        nonlocal tokens
        if reasons := reasons_of(output):
            for observer in observers:
                observer.failed(step + 1, name, reasons)
        metrics.update(summary(name, output))
        tokens += int(output.own_lengths.sum()) if isinstance(output, Sequences) else 0

    edges: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    read = {"prompts": data.prompts, "examples": data.examples, "pairs": data.pairs}
    try:
        if rounds:
            seconds, said = rounds.run(engines, step, edges, made)
            metrics.update(said)
        for name in () if rounds else plan.graph.sources:
            with edge(name):
                edges[name] = read[name](step)
            made(name, edges[name])
        if edges:
            seconds |= run_graph(plan.graph, engines, edges, made)
        seconds["copy"] = _copy_weights(plan, engines, version=step + 1)
    except EngineError as error:
        raise EngineError(f"step {step + 1}: {error}") from error
    total = time.perf_counter() - began
    times = {f"seconds/{name}": value for name, value in seconds.items()}
    return {
        **metrics,
        "tokens": tokens,
        "tokens_per_second": tokens / total,
        "seconds": total,
        **times,
        **engines.measured(step + 1),
    }


def _copy_weights(plan: Plan, engines: Mapping[str, Any], version: int) -> float:
    began = time.perf_counter()
    for copy in plan.workload.copies:
        engines[copy.target].load_weights(engines[copy.source].weights(), version)
    return time.perf_counter() - began


def _held_out_rows(plan: Plan) -> Rows:
    options = plan.recipe.evaluation
    return load_rows(plan.recipe.data, "eval_split")[: options.num_prompts] if options else []


def _open_data(
    plan: Plan, models: Mapping[str, Model], rows: Rows, held_out: Rows, behind: checkpoint.Progress
) -> DataSource:
    recipe, graph = plan.recipe, plan.graph
    name = recipe.roles[graph.tokenizer_role()].model
    tokenizer = load_tokenizer(name, models[name])
    data = open_training_data(
        recipe.data,
        tokenizer,
        rows,
        recipe.seed,
        held_out=held_out,
        with_responses="examples" in graph.sources,
        with_pairs="pairs" in graph.sources,
        ahead=begun_ahead(graph, recipe.data.batch_size),
        steps=recipe.steps,
        behind=(behind.step, behind.rows),
    )
    check_examples(plan, data)
    return data


def _check_steps(plan: Plan, behind: int) -> None:
    if plan.recipe.steps < behind:
        fact = f"{plan.recipe.steps} is less than the {behind} steps that the run has behind it"
        raise RecipeError("steps", fact, fix="steps=+100 trains for 100 more")


def _is_due(plan: Plan, step: int) -> bool:
    every = plan.recipe.evaluation.every if plan.recipe.evaluation else 1
    return step % every == 0 or step == plan.recipe.steps


def _export(directory: Path, trained: Mapping[str, Any]) -> dict[str, str]:
    folders = {role: directory / "model" / role for role in trained}
    for role, folder in folders.items():
        # A run that went on has another model than the one that it exported before.
        checkpoint.write_whole(folder, trained[role].export, replaces=True)
    return {role: str(folder) for role, folder in folders.items()}
