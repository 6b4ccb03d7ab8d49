"""The models, the data and the runtime of a run."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from rlflow.compiler import compile_recipe
from rlflow.compiler.models import may_see_images, models_in_use, trained_model, trained_role
from rlflow.compiler.plan import Plan
from rlflow.data.chat_template import processor_template
from rlflow.data.encoding import Reader
from rlflow.data.mistakes import Rows
from rlflow.data.source import DataSource, SourceEdge, open_training_data
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.registry import engine_kind
from rlflow.engines.vision.base import VisionFamily, load_vision
from rlflow.recipe import Data, Model
from rlflow.resources.models.config import check_agreement
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.preflight import check_examples, check_rows
from rlflow.runtime.protocols import Report, Runtime
from rlflow.system.atomic_folder import write_folder


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
    if folder := os.environ.get("RLFLOW_CACHE"):
        return Path(folder)
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
    folder = cache_folder() / f"{model.recipe.name}-{base.fingerprint}{_tokenizer_digest(trained_model(model.recipe))}"
    if not folder.exists():
        report = train_base(base, name)
        if report.status == "stopped":
            raise KeyboardInterrupt
        exported = report.models[trained_role(model.recipe)]
        write_folder(folder, lambda temporary: shutil.copytree(exported, temporary, dirs_exist_ok=True))
    return replace(model, path=str(folder.resolve()), recipe=None)


def _tokenizer_digest(model: Model) -> str:
    """Return what tells the tokenizer that rlflow makes for random weights from that of another version of rlflow."""
    if not model.random_weights:
        return ""
    tokenizer = new_tokenizer(model)
    text = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.chat_template}{tokenizer.special_tokens_map}"
    return f"-{blake2b(text.encode(), digest_size=4).hexdigest()}"


def open_data(
    plan: Plan,
    models: Mapping[str, Model],
    rows: Rows,
    held_out: Mapping[str, tuple[Data, Rows]],
    progress: RunProgress,
) -> DataSource:
    """Encode the rows of training and evaluation for the graph of a plan. Raises RecipeError."""
    recipe, graph = plan.recipe, plan.graph
    warnings = check_rows(plan, rows, held_out)
    name = recipe.roles[graph.tokenizer_role()].model
    edge: SourceEdge = "pairs" if "pairs" in graph.sources else "examples" if "examples" in graph.sources else "prompts"
    model, tokenizer = models[name], load_tokenizer(name, models[name])
    num_embeddings = model.architecture.vocab_size if model.architecture else None

    def load_family() -> VisionFamily:
        if tokenizer.chat_template is None and model.path is not None:
            tokenizer.chat_template = processor_template(model.path)
        return load_vision(name, model, tokenizer)

    reader = Reader(num_embeddings, load_family if may_see_images(recipe, graph) else None)
    data = open_training_data(recipe.data, tokenizer, rows, recipe.seed, held_out=held_out, edge=edge, reader=reader)
    check_examples(plan, data)
    renders_prompts = any(getattr(node.operation, "reads_rendered_prompts", False) for node in graph.nodes)
    return replace(
        data,
        resumed_at=(progress.step, progress.rows),
        renders_prompts=renders_prompts,
        warnings=(*warnings, *data.warnings),
    )
