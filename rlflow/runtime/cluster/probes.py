"""Questions that may hang, crash or take long, each answered by a process of its own.

``python -m rlflow.runtime.cluster.probes NAME [ARGUMENT]`` prints the answer of a function of this file as JSON.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlflow.errors import UserError, first_line
from rlflow.runtime.cluster.machine import PCI_ORDER, ask


def probe(name: str, argument: str = "", *, seconds: float) -> tuple[Any, str | None]:
    """What ``name`` finds, or None and why it finds nothing. Raises nothing, and ends in time."""
    command = [sys.executable, "-m", "rlflow.runtime.cluster.probes", name, argument]
    answer = ask(command, seconds)
    if answer.problem:
        return None, answer.problem
    try:
        found = json.loads(answer.output.splitlines()[-1])
        return found["found"], found["problem"]
    except (IndexError, ValueError, KeyError):
        return None, f"'{' '.join(command[1:])}' printed no answer"


def importing(library: str) -> None:
    """Raises whatever importing it raises; of vLLM its compiled part, too, which must match the torch that is here."""
    import_module(library)
    if library == "vllm":
        import torch

        # vLLM itself only warns when this fails.
        import_module("vllm.platforms").current_platform.import_kernels()
        if not hasattr(torch.ops._C, "rms_norm"):
            raise ImportError(f"its compiled part does not load with torch {torch.__version__}")


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
    from rlflow.runtime.cluster.hosts import live_hosts, quiet_ray, running_ray

    if (address := running_ray()) is None:
        return None
    quiet_ray().init(address, log_to_driver=False, logging_level="ERROR")
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
