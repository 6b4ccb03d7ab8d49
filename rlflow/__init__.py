"""rlflow compiles a recipe into a graph that is placed on a cluster, and runs it to train a model.

``load`` composes and checks a recipe, ``compile`` plans it for a cluster, ``run`` trains, and ``show`` draws a plan or
a report.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlflow._version import __version__ as __version__

if TYPE_CHECKING:
    from rlflow.compiler.plan import Plan
    from rlflow.recipe import Recipe, Trace, Tune
    from rlflow.resources.cluster import Cluster
    from rlflow.runtime.protocols import Observer, Report

__all__ = ["Observer", "compile", "load", "run", "show"]


class _SubcommandFinder:
    """A finder for ``python -m rlflow.doctor`` and the like, which run as ``python -m rlflow doctor``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return ``__main__`` under the name of a subcommand; None for any other module."""
        package, _, command = name.removesuffix(".__main__").partition(".")
        if package != "rlflow" or "." in command or find_spec(f"rlflow.commands.{command}") is None:
            return None
        return spec_from_file_location(name, Path(__file__).with_name("__main__.py"))


# Modules that exist are found before.
sys.meta_path.append(_SubcommandFinder)


def load(overrides: Sequence[str] = (), config_dir: Path | None = None) -> "Recipe":
    """Compose and check the recipe for these overrides, which are written as on the command line.

    ``config_dir`` is a folder with configuration files of your own. Raises RecipeError.
    """
    from rlflow.recipe.compose import compose, recipe_from_config

    return recipe_from_config(compose(overrides, config_dir), config_dir)


def compile(recipe: "Recipe", cluster: "Cluster | str | None" = None, config_dir: Path | None = None) -> "Plan":
    """Plan what runs where on ``cluster``: hosts, a shape such as ``2x8@h200``, or "auto".

    The default is this machine: its GPUs, or its CPU if it has none. ``config_dir`` is a folder with clusters and kinds
    of GPU of your own. Raises GraphError, RecipeError and PlacementError.
    """
    import warnings

    from rlflow.compiler import compile_recipe
    from rlflow.recipe.compose import load_cluster
    from rlflow.runtime.ray.cluster.free_gpus import default_cluster, detect_cluster

    if cluster is None:
        cluster = default_cluster(lambda reason: warnings.warn(reason, stacklevel=3), config_dir)
    elif isinstance(cluster, str):
        cluster = detect_cluster(config_dir) if cluster == "auto" else load_cluster(cluster, config_dir)
    return compile_recipe(recipe, cluster)


def run(
    plan: "Plan",
    directory: Path | None = None,
    *,
    resume: Path | str | None = None,
    observers: "Sequence[Observer] | None" = None,
    stop: Callable[[], bool] = lambda: False,
    tune: "Tune" = False,
    trace: "Trace" = False,
    profile: Collection[int] = (),
) -> "Report":
    """Train as planned, and return the report, with the metrics of the last step.

    Plan, metrics, checkpoints, model and report are written to ``directory``, by default a new folder below
    ``outputs``. ``resume`` is the folder of a run to continue from its last checkpoint. ``observers`` are called after
    every step; the default ones show progress on standard output, and ``()`` shows nothing. ``stop`` is called after
    every step; when it returns True, the run ends with a checkpoint.

    ``tune``, True or "adaptive", looks for faster batch sizes while the run trains. ``trace``, True or numbers of
    steps, writes ``trace.json``. ``profile`` are the steps of which torch's profiler writes traces to ``profiles``.

    Raises EngineError, and RecipeError for a file or data set that the recipe names and that does not exist.

    Example:

        recipe = rlflow.load(["recipe=beginner_tiny", "steps=20", "evaluation=null"])
        report = rlflow.run(rlflow.compile(recipe))
        print(report.models["actor"], report.metrics["update/loss"])
    """
    from datetime import datetime

    from rlflow.recipe.options import RunOptions
    from rlflow.report.console import output_console
    from rlflow.report.hub import check_push, push
    from rlflow.report.observers import displays, recorders
    from rlflow.runtime.prepare import runtime_of
    from rlflow.runtime.run import run as run_plan

    folder = Path(resume or directory or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    console = output_console()
    check_push(plan)
    every = [*recorders(plan), *(displays(console) if observers is None else observers)]
    options = RunOptions(tune=tune, trace=trace, profile=tuple(profile))
    report = run_plan(plan, folder, runtime_of(plan), every, options, resume=resume is not None, stop=stop)
    if (address := push(plan, report)) is not None and observers is None:
        console.print(f"  uploaded to: {address}", soft_wrap=True)
    return report


def show(shown: "Plan | Report", *, explain: bool = False) -> None:
    """Show a plan or a report to a person: as text on a terminal, as HTML in a notebook.

    ``explain`` adds to a plan its graph, all alternatives and all limits.
    """
    from rlflow.report.show import show

    show(shown, explain=explain)


def __getattr__(name: str) -> Any:
    # Imported on first use, because planning must not import the runtime.
    if name == "Observer":
        from rlflow.runtime.protocols import Observer

        return Observer
    raise AttributeError(f"module 'rlflow' has no attribute '{name}'")
