"""Which runtime a plan needs.

Models that other recipes make, run when the cache does not have them.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rlflow.compiler import compile_recipe
from rlflow.compiler.lower import models_in_use, trained_role
from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_kind
from rlflow.recipe import Model
from rlflow.resources.models.config import check_agreement
from rlflow.runtime.checkpoint import write_whole
from rlflow.runtime.protocols import Report, Runtime


def runtime_of(plan: Plan) -> Runtime:
    """This process for one GPU and engines that live in it; Ray for all else."""
    bundles = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    packages = {engine_kind(role.engine).package for role in plan.recipe.roles.values()}
    if len(bundles) == 1 and packages == {None}:
        from rlflow.runtime.local import LocalRuntime

        return LocalRuntime()
    from rlflow.runtime.ray.runtime import RayRuntime

    return RayRuntime()


def cache_folder() -> Path:
    """RLFLOW_CACHE, or ``rlflow`` in the user's cache folder."""
    if given := os.environ.get("RLFLOW_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlflow"


def resolve_models(plan: Plan, run: Callable[[Plan, str], Report]) -> dict[str, Model]:
    """The recipe's models in use, each with a path or random weights. Folders are absolute: workers are started
    elsewhere. Raises RecipeError for a folder whose model has other figures than the plan.

    ``run`` runs the plan of another recipe, for the model of that name. Raises KeyboardInterrupt when that was stopped.
    """
    models: Mapping[str, Model] = models_in_use(plan.recipe)
    return {name: _resolve(plan, name, model, run) for name, model in models.items()}


def _resolve(plan: Plan, name: str, model: Model, run: Callable[[Plan, str], Report]) -> Model:
    if model.recipe is None:
        if model.path is not None and model.architecture is not None:
            check_agreement(model.architecture, model.architecture_of, model.path, f"models.{name}")
        folder = Path(model.path or "").expanduser()
        return replace(model, path=str(folder.resolve())) if model.path and folder.is_dir() else model
    base = compile_recipe(model.recipe, plan.cluster)
    folder = cache_folder() / f"{model.recipe.name}-{base.fingerprint}"
    if not folder.exists():
        report = run(base, name)
        if report.status == "stopped":
            raise KeyboardInterrupt
        made = report.models[trained_role(model.recipe)]
        write_whole(folder, lambda temporary: shutil.copytree(made, temporary, dirs_exist_ok=True))
    return replace(model, path=str(folder.resolve()), recipe=None)
