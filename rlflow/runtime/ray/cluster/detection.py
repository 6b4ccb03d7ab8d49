"""The cluster that a plan is for where none is named: the GPUs of a running Ray, or those of this machine."""

from collections.abc import Callable
from pathlib import Path

from rlflow.errors import RecipeError
from rlflow.recipe.compose import cluster_of_hosts, load_cluster
from rlflow.resources.cluster import Cluster
from rlflow.runtime.ray.cluster.free_gpus import free_gpus
from rlflow.runtime.ray.cluster.machine import gpus_of_this_machine


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
