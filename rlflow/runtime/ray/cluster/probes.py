"""What ``cluster=auto`` plans for: the GPUs that are there and free.

Questions that may hang, crash or take long, each answered by a process of its own.

``python -m rlflow.runtime.ray.cluster.probes NAME [ARGUMENT]`` prints the answer of a function of this file as JSON.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rlflow.engines.registry import import_package
from rlflow.errors import PlacementError, UserError, first_line
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.binding import LiveHost, in_order
from rlflow.runtime.ray.cluster.hosts import holders, joined, live_hosts, ray_errors, running_ray
from rlflow.runtime.ray.cluster.machine import PCI_ORDER, ask, gpus_of_this_machine

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
    ray = import_ray()
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


def probe(name: str, argument: str = "", *, seconds: float) -> tuple[Any, str | None]:
    """What ``name`` finds, or None and why it finds nothing. Raises nothing, and ends in time."""
    command = [sys.executable, "-m", "rlflow.runtime.ray.cluster.probes", name, argument]
    answer = ask(command, seconds)
    if answer.problem:
        return None, answer.problem
    try:
        found = json.loads(answer.output.splitlines()[-1])
        return found["found"], found["problem"]
    except (IndexError, ValueError, KeyError):
        return None, f"'{' '.join(command[1:])}' printed no answer"


def importing(library: str) -> None:
    """Import the library and check its installation. Raises whatever error it raises."""
    import_package(library)


def cuda() -> dict[str, Any]:
    """Of torch: the CUDA that it is built for (None: for the processor), its NCCL, and the GPUs that calculate."""
    import torch

    if torch.version.cuda is None:
        return {"built_for": None, "nccl": None, "gpus": 0}
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16)
        if (ones @ ones).sum().item() != 16**3:
            raise RuntimeError(f"GPU {index} ({torch.cuda.get_device_name(index)}) multiplies wrongly")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"built_for": torch.version.cuda, "nccl": nccl, "gpus": torch.cuda.device_count()}


def ray_hosts() -> list[dict[str, Any]] | None:
    """Name, GPUs and free GPUs of each host of the cluster that a run would join; None without one.

    Raises PlacementError, or what Ray raises, for a cluster that cannot be joined.
    """
    from rlflow.runtime.ray.cluster.hosts import live_hosts, running_ray

    if (address := running_ray()) is None:
        return None
    import_ray().init(address, log_to_driver=False, logging_level="ERROR")
    return [{"name": host.name, "gpus": host.gpus, "free": host.free_gpus} for host in live_hosts() if host.alive]


def sandbox() -> None:
    """Raises SandboxError where this host does not allow it."""
    from rlflow.rewards.functions.code import prepare

    prepare()


PROBES: dict[str, Callable[..., Any]] = {
    "importing": importing,
    "cuda": cuda,
    "ray_hosts": ray_hosts,
    "sandbox": sandbox,
}


def main() -> None:
    """Prints the answer to the probe that the command line names."""
    name, *arguments = sys.argv[1:]
    os.environ.update(PCI_ORDER)
    try:
        found, problem = PROBES[name](*filter(None, arguments)), None
    except UserError as error:
        found, problem = None, error.fact
    except Exception as error:  # whatever a library raises is the answer
        found, problem = None, first_line(error)
    print(json.dumps({"found": found, "problem": problem}), flush=True)
    # Libraries may leave threads that do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
