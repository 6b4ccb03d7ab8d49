"""Finds what a command leaves out: the cluster of this machine, and the earlier run that ``resume`` continues."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlflow.compiler.continuation import experiment_of, is_same_but_longer
from rlflow.compiler.plan import read_plan
from rlflow.errors import RecipeError, UserError
from rlflow.recipe import Recipe
from rlflow.recipe.compose import cluster_of_hosts, load_cluster
from rlflow.resources.cluster import Cluster
from rlflow.runtime.ray.cluster.machine import gpus_of_this_machine
from rlflow.runtime.ray.cluster.probes import free_gpus


def detect_cluster(config_dir: Path | None = None) -> Cluster:
    """Return the free GPUs of the Ray cluster that runs here; without one those of this machine, or its CPU.

    Raises PlacementError for a Ray cluster without a free GPU, and RecipeError for an unknown kind of GPU.
    """
    return cluster_of_hosts(free_gpus(), config_dir)


def default_cluster(warn: Callable[[str], object], config_dir: Path | None = None) -> Cluster:
    """Return ``detect_cluster()`` if this machine has GPUs, and its CPU otherwise.

    ``warn`` receives the reason when this machine has GPUs that cannot be used. This imports neither torch nor Ray.
    """
    if not gpus_of_this_machine():
        return load_cluster("local", config_dir)
    try:
        return detect_cluster(config_dir)
    except RecipeError as error:
        warn(f"planning for the CPU, because the GPUs of this machine cannot be used. {error}")
        return load_cluster("local", config_dir)


def find_run(resume: bool | str, recipe: Recipe, root: Path) -> Path | None:
    """Return the folder of the run to continue: the path ``resume``, or this recipe's newest run below ``root``.

    Return None when no run is continued. Raises RecipeError when no such run exists.
    """
    if resume is False:
        return None
    if resume is not True:
        folder = Path(os.path.expanduser(resume))
        if not resume or not (folder / "plan.json").is_file():
            fix = "resume=FOLDER with the folder of a run, as outputs/DATE/TIME, or leave out resume"
            raise RecipeError("resume", f"'{resume}' is not the folder of a run", fix=fix)
        return folder
    candidates = [path for path in root.glob("*/*/plan.json") if _is_run_of(recipe, path)]
    if not candidates:
        raise RecipeError(
            "resume",
            f"no run of this recipe with a checkpoint below '{root}'",
            fix="resume=FOLDER, which also allows another batch size or learning rate, or leave out resume",
        )
    return max(candidates, key=lambda path: path.stat().st_mtime).parent


def num_finished_steps(folder: Path) -> int:
    """Return the steps of the newest checkpoint in ``folder``; 0 without one."""
    from rlflow.runtime.checkpoint import checkpoint_step, checkpoints

    return max(map(checkpoint_step, checkpoints(folder)), default=0)


def cluster_of_run(folder: Path) -> Cluster | None:
    """Return the cluster that the run in ``folder`` was planned for; None if its plan cannot be read."""
    with suppress(UserError):
        return read_plan(folder / "plan.json").cluster
    return None


def _is_run_of(recipe: Recipe, path: Path) -> bool:
    with suppress(UserError):
        same = is_same_but_longer(experiment_of(read_plan(path).recipe), experiment_of(recipe))
        return same and any(path.parent.glob("**/checkpoints/step-*"))
    return False
