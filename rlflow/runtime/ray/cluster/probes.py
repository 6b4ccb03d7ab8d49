"""The free GPUs that ``cluster=auto`` plans for, and probes of this machine that may hang, crash or take long.

Each probe runs in its own process: ``python -m rlflow.runtime.ray.cluster.probes NAME [ARGUMENT]`` prints the result of
a function of this file as JSON.
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
from rlflow.runtime.ray.cluster.binding import LiveHost, sort_key
from rlflow.runtime.ray.cluster.connection import joined, ray_errors, running_ray
from rlflow.runtime.ray.cluster.hosts import gpu_users, live_hosts
from rlflow.runtime.ray.cluster.machine import PCI_ORDER, gpus_of_this_machine, run_command

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
            own = next((name for name in (host.name, host.address) if name_counts[name] == 1), host.node_id)
            names = devices.get(host.node_id, ())
            free[own] = list(names if host.free_gpus and len(set(names)) > 1 else names[: host.free_gpus])
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


def probe(name: str, argument: str = "", *, seconds: float) -> tuple[Any, str | None]:
    """Run a probe in its own process. Return its result, or None and the problem. Raises nothing, and ends in time."""
    command = [sys.executable, "-m", "rlflow.runtime.ray.cluster.probes", name, argument]
    answer = run_command(command, seconds)
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
    """Return the CUDA version that torch is built for (None: CPU only), its NCCL version, and the working GPUs."""
    import torch

    if torch.version.cuda is None:
        return {"built_for": None, "nccl": None, "gpus": 0}
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16)
        if (ones @ ones).sum().item() != 16**3:
            raise RuntimeError(f"GPU {index} ({torch.cuda.get_device_name(index)}) computes wrong products")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"built_for": torch.version.cuda, "nccl": nccl, "gpus": torch.cuda.device_count()}


def ray_hosts() -> list[dict[str, Any]] | None:
    """Return name, GPUs and free GPUs of each host of the Ray that a run would join; None without one.

    Raises PlacementError, or an error of Ray, for a Ray that cannot be joined.
    """
    if (address := running_ray()) is None:
        return None
    import_ray().init(address, log_to_driver=False, logging_level="ERROR")
    return [{"name": host.name, "gpus": host.gpus, "free": host.free_gpus} for host in live_hosts() if host.alive]


def sandbox() -> None:
    """Check that this host allows the sandbox. Raises SandboxError."""
    from rlflow.rewards.functions.code import prepare

    prepare()


PROBES: dict[str, Callable[..., Any]] = {
    "importing": importing,
    "cuda": cuda,
    "ray_hosts": ray_hosts,
    "sandbox": sandbox,
}


def main() -> None:
    """Print the result of the probe that the command line names."""
    name, *arguments = sys.argv[1:]
    os.environ.update(PCI_ORDER)
    try:
        found, problem = PROBES[name](*filter(None, arguments)), None
    except UserError as error:
        found, problem = None, error.fact
    except Exception as error:  # whatever a library raises is the problem
        found, problem = None, first_line(error)
    print(json.dumps({"found": found, "problem": problem}), flush=True)
    # Libraries may leave threads behind that do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
