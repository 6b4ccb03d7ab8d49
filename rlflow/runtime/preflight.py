"""The checks of a run before anything starts: its directory, the host, tokenizers, and the lengths of examples."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.checks.models import FIX_REWARD_MODEL, reward_models
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.graph import Graph, evaluation_nodes
from rlflow.compiler.models import model_architecture, trained_model
from rlflow.compiler.plan import Plan
from rlflow.data.loading import describe_rows
from rlflow.data.mistakes import Rows
from rlflow.data.source import DataSource
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError, below
from rlflow.recipe import Data, Model, Recipe
from rlflow.runtime.checkpoint import Checkpoint, RunProgress, checkpoints, last
from rlflow.runtime.engine_specs import is_on_gpu
from rlflow.runtime.protocols import Runtime

Lengths = NDArray[np.int64]

# The capabilities that read or generate tokens.
_WITH_TOKENS = {"Generates", "Scores", "ScoresTop", "Values", "Evaluates", "Trains"}
# The folders of a run that only rlflow writes. Libraries of trackers have links in theirs.
_FOLDERS = ("checkpoints", "journal", "model", "profiles", "skipped")


def check_directory(directory: Path, *, resume: bool) -> None:
    """Raise RecipeError for a run to be resumed whose directory does not exist, and for links in it.

    A run deletes and replaces files in its folder, and a link would lead that to other folders.
    """
    if resume and not directory.is_dir():
        raise _no_checkpoint(directory)
    if link := next((path for path in _paths(directory) if path.is_symlink()), None):
        raise RecipeError(
            "hydra.run.dir",
            f"'{link}' is a link to '{os.readlink(link)}', and a run writes only inside of its own folder",
            fix="put its content in place of the link, or keep the whole run on another disk: hydra.run.dir=FOLDER "
            "for a new run, resume=FOLDER after moving one",
        )


def _paths(directory: Path) -> Iterator[Path]:
    """Yield the paths in the folder of a run that the run may write: a folder before its content."""
    yield from directory.glob("*")
    yield from (directory / "base").glob("*")
    for name in _FOLDERS:
        yield from (directory / name).rglob("*")


def check_before_start(plan: Plan, directory: Path, runtime: Runtime, *, resume: bool) -> None:
    """Raise a UserError or an EngineError for a plan that cannot run here, before anything starts."""
    if not resume and checkpoints(directory):
        raise RecipeError("resume", f"'{directory}' holds a run already", fix=f"resume={directory}, or another folder")
    runtime.check(plan)
    check_vocabularies(plan)
    check_reward_folders(plan.recipe, plan.graph)
    for node in plan.graph.nodes:
        node.operation.check_host()


def check_reward_folders(recipe: Recipe, graph: Graph) -> None:
    """Read ``config.json`` of the reward models on this machine. Raises RecipeError for a model of another kind."""
    for name, model in reward_models(recipe, graph):
        classes = _model_classes(model)
        if classes and not any(name.endswith("ForSequenceClassification") for name in classes):
            fact = f"'{model.path}' is not a reward model: its config.json names {', '.join(classes)}"
            raise RecipeError(f"models.{name}.path", fact, fix=FIX_REWARD_MODEL)


def _model_classes(model: Model) -> list[str]:
    """Return the classes that a model's ``config.json`` names; none where it cannot be read, which loading reports."""
    if model.path is None:
        return []
    try:
        config = json.loads((Path(os.path.expanduser(model.path)) / "config.json").read_text())
        return list(config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def last_checkpoint(plan: Plan, directory: Path, *, resume: bool) -> tuple[Checkpoint | None, RunProgress]:
    """Return the checkpoint to resume from, if any, and the progress so far.

    Raises RecipeError for a run to be resumed without a checkpoint, and for a recipe with fewer steps than it has made.
    """
    experiment = experiment_of(plan.recipe)
    checkpoint = last(directory, experiment) if resume else None
    # A run that was stopped while it trained a base model has no checkpoint of its own yet.
    if resume and not checkpoint and not (directory / "base").is_dir():
        raise _no_checkpoint(directory)
    progress = checkpoint.progress if checkpoint else RunProgress(experiment, 0, 0, {})
    if plan.recipe.steps < progress.step:
        fact = f"{plan.recipe.steps} is less than the {progress.step} steps that the run has made"
        raise RecipeError("steps", fact, fix="steps=+100 trains for 100 more")
    return checkpoint, progress


def with_data(progress: RunProgress, rows: Rows, directory: Path) -> RunProgress:
    """Return the progress with a description of its rows. Raises RecipeError if a resumed run had other ones.

    A step takes rows by their places, so other rows would repeat some and leave out others.
    """
    data = describe_rows(rows)
    if progress.data not in ("", data):
        raise RecipeError(
            "resume",
            f"'{directory}' was trained on {progress.data}, and data.source now has {data}",
            fix=f"restore the rows, or a new run that starts from models.NAME.path={directory}/model/ROLE",
        )
    return replace(progress, data=data)


def _no_checkpoint(directory: Path) -> RecipeError:
    return RecipeError("resume", f"'{directory}' has no checkpoint", fix="start the run again, without resume")


def check_vocabularies(plan: Plan) -> None:
    """Raise RecipeError for a model whose tokenizer has another number for a token than the one that encodes prompts.

    Tokens travel between models as numbers. Models that other recipes train need not exist yet.
    """
    recipe, graph = plan.recipe, plan.graph
    reading = recipe.roles[graph.tokenizer_role()].model
    readers = {
        role.model: name
        for name, role in recipe.roles.items()
        if role.model != reading and graph.capabilities(name) & _WITH_TOKENS
    }
    vocabulary = _vocabulary(recipe, reading) if readers else {}
    for model, role in readers.items():
        other = _vocabulary(recipe, model)
        for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
            if other.get(token) != number:
                fact = f"it has number {other[token]}" if token in other else "it has no such token"
                raise RecipeError(
                    f"roles.{role}.model",
                    f"'{model}' reads the tokens of '{reading}', where '{token}' has number {number}; here {fact}",
                    fix="use a model with the same tokenizer",
                )


def _vocabulary(recipe: Recipe, name: str) -> dict[str, int]:
    """Return the numbers of all tokens. Training does not change a tokenizer, so a base model's is the same."""
    model = recipe.models[name]
    while model.recipe is not None:
        model = trained_model(model.recipe)
    vocabulary: dict[str, int] = load_tokenizer(name, model).get_vocab()
    return vocabulary


def check_rows(plan: Plan, rows: Rows, held_out: Mapping[str, tuple[Data, Rows]]) -> list[str]:
    """Return the warnings of nodes about rows that they read. Raises RecipeError for a row that a node cannot read."""
    data, nodes, measured = plan.recipe.data, plan.graph.nodes, evaluation_nodes(plan.graph)
    sets = [(node, rows, f"'{data.split}' of '{data.source}'") for node in nodes]
    for name, (of_set, set_rows) in held_out.items() if measured else ():
        where = f"'{of_set.eval_split}' of '{of_set.source}'" + (f", evaluation set '{name}'" if name else "")
        sets += [(node, set_rows, where) for node in measured or ()]
    warnings = []
    for node, read_rows, where in sets:
        with below(f"graph.{node.name}"):
            warnings += [f"graph.{node.name}.{warning}" for warning in node.operation.check_rows(read_rows, where)]
    return warnings


def check_examples(plan: Plan, data: DataSource) -> None:
    """Raise RecipeError for an example or a pair that does not fit a role's micro-batch or its model's positions.

    Prompts are within their limit already, and generated responses end at theirs. Where the size of a micro-batch is
    neither pinned nor limited by memory, a longer example is a micro-batch by itself.
    """
    if data.response_ids is None:
        return
    sequences = data.prompt_ids.lengths + data.response_ids.lengths
    at, rows = "data.split", f"'{data.data.split}' of '{data.data.source}'"
    if data.rejected_ids is None:
        _check(plan, "examples", at, rows, sequences, sequences)
        return
    _check_pairs(plan, at, rows, sequences, data.prompt_ids.lengths + data.rejected_ids.lengths)
    sets = plan.recipe.evaluation.sets_with(data.data.eval_split) if plan.recipe.evaluation else {}
    for name in data.held_out:
        both = data.held_out_pairs(name)
        held_out = both.prompt_ids.lengths + both.response_ids.lengths
        at = f"evaluation.sets.{name}.split" if name else "data.eval_split"
        rows = f"'{sets[name].split}' of '{sets[name].source or data.data.source}'"
        _check_pairs(plan, at, rows, held_out[0::2], held_out[1::2])


def _check_pairs(plan: Plan, at: str, rows: str, chosen: Lengths, rejected: Lengths) -> None:
    # Both responses go through a model in one pass.
    _check(plan, "pairs", at, rows, chosen.clip(min=rejected), chosen + rejected)


def _check(plan: Plan, source: str, path: str, rows: str, sequences: Lengths, passes: Lengths) -> None:
    """Check the longest sequence of each row, and the tokens that go through a model in one pass because of it.

    ``rows`` names the rows in the error, and ``path`` is where the recipe names them.
    """
    one, one_pass = ("example", "example") if source == "examples" else ("longer sequence", "pair")
    for node in plan.graph.nodes:
        if node.role is None or source not in node.inputs.values():
            continue
        role, at = plan.recipe.roles[node.role], f"roles.{node.role}.micro_batch_tokens"
        model = model_architecture(plan.recipe.models[role.model])
        limits = []
        if model is not None:
            positions = model.max_position_embeddings
            limits.append((one, sequences, positions, "positions of its model", "use a model with more"))
        if is_on_gpu(plan) or role.micro_batch_tokens != "auto":
            tokens = plan.roles[node.role].layout.micro_batch_tokens
            of = f"tokens in a micro-batch of role {node.role}"
            limits.append((one_pass, passes, tokens, of, f"{at}={passes.max()}"))
        for what, lengths, limit, of, fix in limits:
            if (longest := lengths.max()) > limit:
                raise RecipeError(
                    path,
                    f"the {what} of row {lengths.argmax()} of {rows} has {longest} tokens, more than the {limit} {of}",
                    fix=f"{fix}, or remove such rows",
                )
