"""rlflow: from a recipe to a placed graph, and from there to a trained model.

``load`` composes and checks a recipe, ``compile`` plans it for a cluster, ``run`` trains.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.compiler.plan import Plan
    from rlflow.recipe import Recipe, Tune
    from rlflow.resources.cluster import Cluster
    from rlflow.runtime.protocols import Observer, Report

__version__ = "0.1.0"
__all__ = ["Observer", "compile", "load", "run"]


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
    from rlflow.compiler import compile_recipe
    from rlflow.compose import cluster_named

    if cluster is None:
        cluster = default_cluster(lambda reason: warnings.warn(reason, stacklevel=3))
    elif isinstance(cluster, str):
        cluster = detect_cluster() if cluster == "auto" else cluster_named(cluster)
    return compile_recipe(recipe, cluster)


def run(
    plan: "Plan",
    directory: Path | None = None,
    *,
    resume: Path | str | None = None,
    observers: "Sequence[Observer] | None" = None,
    stop: Callable[[], bool] = lambda: False,
    tune: "Tune" = False,
) -> "Report":
    """Train as planned, and return the report, with the metrics of the last step.

    Plan, metrics, checkpoints, model and report are written to ``directory``, by default a new folder below
    ``outputs``. ``resume`` is the folder of a run to continue from its last checkpoint. ``observers`` hear of every
    step; by default they show the progress on standard output, and ``()`` shows nothing. ``stop`` is asked after every
    step, and ends the run with a checkpoint when it returns True. ``tune``, True or "adaptive", finds faster sizes
    while the run trains.

    Raises EngineError, and RecipeError for something that the recipe names and that does not exist.

    Example:

        recipe = rlflow.load(["recipe=beginner_tiny", "steps=2", "evaluation=null"])
        report = rlflow.run(rlflow.compile(recipe))
        print(report.models["actor"], report.metrics["update/loss"])
    """
    from datetime import datetime

    from rlflow.report.progress import displays, output_console
    from rlflow.report.records import MetricsWriter
    from rlflow.runtime.prepare import runtime_of
    from rlflow.runtime.run import run as run_plan

    folder = Path(resume or directory or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    watching = displays(output_console()) if observers is None else observers
    everyone = [MetricsWriter(), *watching]
    return run_plan(plan, folder, runtime_of(plan), everyone, resume=resume is not None, stop=stop, tune=tune)


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: planning needs none of what a run does.
    if name == "Observer":
        from rlflow.runtime.protocols import Observer

        return Observer
    raise AttributeError(f"module 'rlflow' has no attribute '{name}'")
