"""The cluster to plan for where a recipe's user names none, or asks for ``auto``."""

from collections.abc import Callable
from pathlib import Path

from rlflow.compose import cluster_named, cluster_of_hosts
from rlflow.errors import RecipeError
from rlflow.resources.cluster import Cluster
from rlflow.runtime.ray.cluster.machine import gpus_of_this_machine
from rlflow.runtime.ray.cluster.probes import live_devices


def detect_cluster(config_dir: Path | None = None) -> Cluster:
    """Return the free GPUs of the Ray cluster that runs here, or else of this machine, or else its CPU.

    Raises PlacementError for a Ray without a free GPU, RecipeError for GPUs without figures.
    """
    return cluster_of_hosts(live_devices(), config_dir)


def default_cluster(tell: Callable[[str], object], config_dir: Path | None = None) -> Cluster:
    """Return ``detect_cluster()`` where this machine has GPUs, or else its CPU.

    ``tell`` gets the reason why GPUs that are there are left out. Looking imports neither torch nor Ray.
    """
    if not gpus_of_this_machine():
        return cluster_named("local", config_dir)
    try:
        return detect_cluster(config_dir)
    except RecipeError as error:
        tell(f"planning for the CPU, since GPUs of this machine cannot be used. {error}")
        return cluster_named("local", config_dir)
