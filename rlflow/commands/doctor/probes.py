"""Probes of this machine that may hang, crash or take long.

Each probe runs in its own process: ``python -m rlflow.commands.doctor.probes NAME [ARGUMENT]`` prints the result of a
function of this file as JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from rlflow.engines.registry import import_package
from rlflow.errors import UserError, first_line
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.connection import running_ray
from rlflow.runtime.ray.cluster.hosts import live_hosts
from rlflow.runtime.ray.cluster.machine import PCI_ORDER, run_command


def probe(name: str, argument: str = "", *, seconds: float) -> tuple[Any, str | None]:
    """Run a probe in its own process. Return its result, or None and the problem. Raises nothing, and ends in time."""
    command = [sys.executable, "-m", "rlflow.commands.doctor.probes", name, argument]
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
