"""Runs a skipped step again on its saved batch: ``rlflow replay RUN_FOLDER [--step N]``.

It prints which values are not finite, by node, sample and token: first those that were saved, then those of the nodes
that score and train, with the weights of the checkpoint nearest to the step, or the initial ones.
Nothing in the run's folder changes.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlflow.batch import RolloutAdvantages
from rlflow.compiler.plan import Plan, read_plan
from rlflow.data.images import images_by_digest
from rlflow.data.loading import load_rows
from rlflow.errors import EngineError, FileError, RecipeError, first_line, make_printable
from rlflow.nodes.generate import Generate
from rlflow.nodes.reward import Reward
from rlflow.runtime.finite import keys_of, places_not_finite, values_of
from rlflow.runtime.skipped_steps import SkippedStep, read_skipped, skipped_folders

# The number of values that are printed for each node.
_MAX_LISTED = 10
_FIX = "another step (--step N), or the folder of another run"


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("rlflow replay", description="Run a skipped step again.")
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="the folder of a run that has skipped a step")
    parser.add_argument("--step", type=int, help="the step; by default the last that was skipped and is still saved")
    options = parser.parse_args(arguments)
    for line in replay(_read_plan(options.run / "plan.json"), options.run, options.step):
        print(make_printable(line), flush=True)
    return 0


def replay(plan: Plan, directory: Path, step: int | None) -> Iterator[str]:
    """Yield the lines of the report. Raises RecipeError for a step that is not saved, FileError for damaged files."""
    skipped = _find(plan, directory, step)
    yield f"step {skipped.step} was skipped: {skipped.reason}"
    yield "saved values that are not finite:"
    lines = [line for name, batch in skipped.edges.items() for line in _describe(name, batch, skipped)]
    yield from lines or ["  none"]
    yield from _run_again(plan, directory, skipped)


def _read_plan(file: Path) -> Plan:
    """Return the plan of the run. Raises RecipeError, with the name of the file."""
    try:
        return read_plan(file)
    except RecursionError:
        raise FileError(str(file), "is too deeply nested for a plan", fix="restore it from a copy") from None
    except RecipeError as error:
        if str(file) not in error.fact:
            error.path = f"{file}: {error.path or 'recipe'}"
        raise


def _find(plan: Plan, directory: Path, step: int | None) -> SkippedStep:
    folders = {int(folder.name.removeprefix("step-")): folder for folder in skipped_folders(directory)}
    if not folders:
        raise RecipeError("run", f"'{directory}' has no batch of a skipped step", fix="the folder of another run")
    if step is not None and step not in folders:
        fact = f"the batch of step {step} is not saved in '{directory}'"
        raise RecipeError("--step", fact, known=sorted(folders), fix="use one of these steps")
    folder = folders[max(folders) if step is None else step]
    _check_reason(folder / "reason.json")
    try:
        data = plan.recipe.data
        return read_skipped(folder, plan.graph, lambda: images_by_digest(load_rows(data, "split")))
    except (EngineError, RecipeError):
        raise  # with a fix of its own, as for a batch of an older version
    except Exception as error:  # damaged files fail in many ways
        for file in sorted(folder.glob("*.npz")):
            _check_arrays(file)
        fact = f"expected batches of this run's plan, found other fields ({first_line(error)})"
        raise FileError(str(folder), fact, fix=_FIX) from None


def _check_reason(file: Path) -> None:
    """Raise FileError for a file that does not have the failed node and its reason."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise FileError(str(file), f"cannot be read ({error.strerror})", fix=_FIX) from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in ("node", "reason")):
        raise FileError(str(file), "expected the texts 'node' and 'reason', found other content", fix=_FIX)


def _check_arrays(file: Path) -> None:
    """Raise FileError for a file that does not have arrays only."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            dict(arrays)
    except Exception:  # damaged files fail in many ways
        raise FileError(str(file), "expected arrays as a run saves them, found other content", fix=_FIX) from None


def _run_again(plan: Plan, directory: Path, skipped: SkippedStep) -> Iterator[str]:
    # Imported late: the saved values are printed before the libraries of the engines load.
    from rlflow.compiler.continuation import experiment_of
    from rlflow.runtime.checkpoint import nearest, restore
    from rlflow.runtime.graph_runner import GraphRunner
    from rlflow.runtime.prepare import resolve_models, runtime_of

    checkpoint = nearest(directory, skipped.step, experiment_of(plan.recipe))
    weights = f"the checkpoint of step {checkpoint.progress.step}" if checkpoint else "the initial weights"
    saved_only = {node.name for node in plan.graph.nodes if isinstance(node.operation, Generate | Reward)}
    nodes = [node for node in plan.graph.nodes if node.name not in saved_only]
    again = {node.name for node in nodes if node.name == skipped.node or node.name not in skipped.edges}
    edges: dict[str, Any] = {name: batch for name, batch in skipped.edges.items() if name not in again}
    with TemporaryDirectory(prefix="rlflow-replay-") as folder:
        models = resolve_models(plan, _refuse_training)
        with runtime_of(plan).start(plan, models, Path(folder)) as engines:
            runner = GraphRunner(plan.graph, engines)
            if checkpoint:
                trained = {role: engines[role] for role in plan.graph.trained_roles()}
                restore(checkpoint, {**trained, **runner.states})
            yield f"run again with {weights}:"
            for node in (node for node in nodes if node.name in again):
                if missing := set(node.inputs.values()) - edges.keys():
                    yield f"  {node.name}: not run, because the step had no {' and no '.join(sorted(missing))} yet"
                    continue
                try:
                    output = runner.run_node(node, edges)
                except EngineError as error:
                    yield f"  {error}"
                    continue
                edges[node.name] = output
                lines = list(_describe(node.name, output, skipped))
                yield from lines or [f"  {node.name}: all values are finite"]


def _refuse_training(base: Plan, name: str) -> Any:
    fact = f"the model of the recipe {base.recipe.name} is not in the cache"
    raise RecipeError(f"models.{name}.recipe", fact, fix="run that recipe first")


def _describe(name: str, batch: Any, skipped: SkippedStep) -> Iterator[str]:
    """Yield a line for each value of a batch that is not finite, up to a limit."""
    if isinstance(batch, RolloutAdvantages):
        rows = np.flatnonzero(~batch.is_included)
        places = [(row, "all tokens", batch.values.run_values[row]) for row in rows.tolist()]
    elif (column := values_of(batch)) is not None:
        rows, tokens = places_not_finite(batch)
        places = [(row, f"token {t}", column[row][t]) for row, t in zip(rows.tolist(), tokens.tolist(), strict=True)]
    else:
        places = []
    keys = keys_of(batch, skipped.edges.values()) if places else None
    for row, token, value in places[:_MAX_LISTED]:
        sample = f"row {row}" if keys is None else "step {} prompt {} sample {}".format(*keys[row])
        yield f"  {name}: {sample}, {token}: {value}"
    if len(places) > _MAX_LISTED:
        yield f"  {name}: {len(places) - _MAX_LISTED} more"
