"""What ``cluster=auto`` plans for: the GPUs that are there and free."""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from rlflow.errors import PlacementError, first_line
from rlflow.runtime.cluster.binding import LiveHost, in_order
from rlflow.runtime.cluster.hosts import holders, joined, live_hosts, quiet_ray, ray_errors, running_ray
from rlflow.runtime.cluster.machine import gpus_of_this_machine

_TOLD_S = 120.0


def live_devices() -> dict[str, list[str]]:
    """For each host of a Ray that runs, else for this machine, what nvidia-smi calls the GPUs that are free there.

    Raises PlacementError for a Ray that cannot be joined or has no GPU free, EngineError for one that fails.
    """
    if find_spec("ray") is None or (address := running_ray()) is None:
        return {"host-0": gpus_of_this_machine()}
    with joined(address), ray_errors(RuntimeError):
        hosts = sorted((host for host in live_hosts() if host.alive), key=in_order)
        devices = _devices_of(hosts)
        free = free_devices(hosts, devices)
        if any(devices.values()) and not any(free.values()):
            raise none_free(hosts, holders())
        return free


def free_devices(hosts: Sequence[LiveHost], devices: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Of the hosts with GPUs, each by a name of its own: as many as are free. ``devices`` has the names of all GPUs of
    a host, by its node id. Where they are of several kinds they are given whole, since which are free is not known."""
    called = Counter(name for host in hosts for name in {host.name, host.address})
    free = {}
    for host in hosts:
        if host.gpus:
            own = next((name for name in (host.name, host.address) if called[name] == 1), host.node_id)
            there = devices.get(host.node_id, ())
            free[own] = list(there if host.free_gpus and len(set(there)) > 1 else there[: host.free_gpus])
    return free


def none_free(hosts: Sequence[LiveHost], holders: Mapping[str, Sequence[str]]) -> PlacementError:
    """``holders`` says by node id who has the GPUs."""
    taken = [f"'{host.name}': {', '.join(holders[host.node_id])}" for host in hosts if host.node_id in holders]
    by = f" (taken: {'; '.join(taken)})" if taken else ""
    return PlacementError(
        "cluster",
        f"Ray has {sum(host.gpus for host in hosts)} GPUs, and none is free{by}",
        fix="wait for them or stop what has them, or plan for other hosts (cluster=2x8, or cluster=local)",
    )


def _devices_of(hosts: Sequence[LiveHost]) -> dict[str, list[str]]:
    """By node id, of those with GPUs."""
    ray = quiet_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = [host.node_id for host in hosts if host.gpus and not host.simulated]
    # All that Ray has there, also where it is told to hide them from who asks for none.
    seeing = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    ask = ray.remote(num_cpus=0, max_retries=0, runtime_env=seeing)(gpus_of_this_machine)
    answers = [ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(id_, False)).remote() for id_ in asked]
    try:
        return dict(zip(asked, ray.get(answers, timeout=_TOLD_S), strict=True))
    except Exception as error:  # of Ray, or of the hosts' own installation
        raise PlacementError("cluster", f"the hosts do not tell their GPUs ({first_line(error)})") from None
