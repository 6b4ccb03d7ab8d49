"""rlflow: from a recipe to a placed graph, and from there to a trained model.

``load`` composes and checks a recipe, ``compile`` plans it for a cluster, ``run`` trains.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlflow.compiler.plan import Plan
    from rlflow.recipe import Recipe, Tune
    from rlflow.resources.cluster import Cluster
    from rlflow.runtime.base import Report

__version__ = "0.1.0"
__all__ = ["compile", "load", "run"]


def load(overrides: Sequence[str] = (), config_dir: Path | None = None) -> "Recipe":
    """The recipe that these overrides of the command line compose; ``config_dir`` holds the user's own parts.

    Raises RecipeError.
    """
    from rlflow.compose import compose, recipe_of

    return recipe_of(compose(overrides, config_dir), config_dir)


def compile(recipe: "Recipe", cluster: "Cluster | str | None" = None) -> "Plan":
    """Return what runs where, on ``cluster``: hosts, a shape as ``2x8@h200``, or "auto".

    By default that is this machine's GPUs, or else its CPU. Raises GraphError, RecipeError and PlacementError.
    """
    import warnings

    from rlflow.cluster_detection import default_cluster, detect_cluster
    from rlflow.compiler.plan import compile_recipe
    from rlflow.compose import cluster_named

    if cluster is None:
        cluster = default_cluster(lambda reason: warnings.warn(reason, stacklevel=3))
    elif isinstance(cluster, str):
        cluster = detect_cluster() if cluster == "auto" else cluster_named(cluster)
    return compile_recipe(recipe, cluster)


def run(plan: "Plan", directory: Path | None = None, *, tune: "Tune" = False) -> "Report":
    """Trains as planned, and writes plan, metrics, checkpoints, model and report to ``directory``, by default a new
    folder below ``outputs``. With ``tune``, True or "adaptive", it finds faster sizes meanwhile.

    Raises EngineError, and RecipeError for what the recipe names and is not there.
    """
    from datetime import datetime

    from rlflow.report.metrics import MetricsWriter
    from rlflow.runtime.choose import runtime_of
    from rlflow.runtime.run import run as run_plan

    folder = directory or Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    return run_plan(plan, folder, runtime_of(plan), [MetricsWriter()], tune=tune)
