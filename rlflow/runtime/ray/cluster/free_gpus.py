"""The free GPUs that ``cluster=auto`` plans for, and the cluster of a recipe for which none is named."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlflow.errors import PlacementError, RecipeError, first_line
from rlflow.recipe.compose import cluster_of_hosts, load_cluster
from rlflow.resources.cluster import Cluster
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.binding import LiveHost, sort_key
from rlflow.runtime.ray.cluster.connection import joined, ray_errors, running_ray
from rlflow.runtime.ray.cluster.hosts import gpu_users, live_hosts
from rlflow.runtime.ray.cluster.machine import gpus_of_this_machine

_ANSWER_S = 120.0


def free_gpus() -> dict[str, list[str]]:
    """Return the names of the free GPUs of each host of a running Ray, or of this machine without a running Ray.

    Raises PlacementError for a Ray that cannot be joined or has no GPU free, EngineError for one that fails.
    """
    if find_spec("ray") is None or (address := running_ray()) is None:
        return {"host-0": gpus_of_this_machine()}
    with joined(address), ray_errors(RuntimeError):
        hosts = sorted((host for host in live_hosts() if host.alive), key=sort_key)
        devices = _gpu_names(hosts)
        free = select_free(hosts, devices)
        if any(devices.values()) and not any(free.values()):
            raise none_free(hosts, gpu_users())
        return free


def select_free(hosts: Sequence[LiveHost], devices: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return as many GPU names of each host as are free, by unique names of the hosts.

    ``devices`` has the names of all GPUs of a host, by its node id. A host with several kinds of GPUs is returned with
    all of them, since it is not known which are free.
    """
    name_counts = Counter(name for host in hosts for name in {host.name, host.address})
    free = {}
    for host in hosts:
        if host.gpus:
            unique_name = next((name for name in (host.name, host.address) if name_counts[name] == 1), host.node_id)
            names = devices.get(host.node_id, ())
            free[unique_name] = list(names if host.free_gpus and len(set(names)) > 1 else names[: host.free_gpus])
    return free


def none_free(hosts: Sequence[LiveHost], users: Mapping[str, Sequence[str]]) -> PlacementError:
    """Return the error for a Ray without a free GPU. ``users`` lists by node id who uses the GPUs."""
    taken = [f"'{host.name}': {', '.join(users[host.node_id])}" for host in hosts if host.node_id in users]
    by = f" (taken: {'; '.join(taken)})" if taken else ""
    return PlacementError(
        "cluster",
        f"Ray has {sum(host.gpus for host in hosts)} GPUs, and none is free{by}",
        fix="wait for them, stop what uses them, or plan for other hosts (cluster=2x8, or cluster=local)",
    )


def _gpu_names(hosts: Sequence[LiveHost]) -> dict[str, list[str]]:
    """Return the names of all GPUs of each host that has any, by node id."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_ids = [host.node_id for host in hosts if host.gpus and not host.simulated]
    # All of the host's GPUs, even if Ray is configured to hide them from tasks that need none.
    runtime_env = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    remote = ray.remote(num_cpus=0, max_retries=0, runtime_env=runtime_env)(gpus_of_this_machine)
    answers = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(id_, False)).remote() for id_ in node_ids
    ]
    try:
        return dict(zip(node_ids, ray.get(answers, timeout=_ANSWER_S), strict=True))
    except Exception as error:  # from Ray, or from the hosts' own installation
        fact = f"the hosts do not report their GPUs ({first_line(error)})"
        raise PlacementError("cluster", fact, fix="check that all hosts have the same Python and rlflow") from None


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
