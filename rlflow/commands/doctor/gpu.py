"""The report on this machine's GPUs. Each check runs in its own process with a deadline, all within ten minutes."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.commands.doctor.finding import Finding
from rlflow.commands.doctor.machine import Device, devices
from rlflow.extras import installed
from rlflow.runtime.ray.cluster.machine import run_command

TOTAL_S = 590.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function of ``rlflow.commands.doctor.checks`` with its arguments, and the libraries that it tests."""

    title: str
    function: str
    """``module:function``; its first argument is the device."""
    libraries: tuple[str, ...]
    seconds: float
    """The deadline."""
    options: Mapping[str, Any] = field(default_factory=dict)
    min_gpus: int = 1


CHECKS = (
    Check(title="Attention", function="numerics:attention", libraries=("torch", "transformers"), seconds=60),
    Check(title="Output layer", function="numerics:output_layer", libraries=("torch",), seconds=60),
    Check(title="Copy to another process", function="transfers:ipc_copy", libraries=("torch",), seconds=90),
    Check(
        title="Update by torch",
        function="updates:update",
        libraries=("torch", "transformers"),
        seconds=90,
        options={"engine": "torch"},
    ),
    Check(
        title="Update by FSDP",
        function="updates:update",
        libraries=("torch", "transformers"),
        seconds=90,
        options={"engine": "fsdp", "num_replicas": 1, "zero_stage": 3},
    ),
    *(
        Check(
            title=f"Update by DeepSpeed, ZeRO {stage}",
            function="updates:update",
            libraries=("torch", "transformers", "deepspeed"),
            seconds=90,
            options={"engine": "deepspeed", "zero_stage": stage},
        )
        for stage in (1, 2, 3)
    ),
    Check(title="vLLM asleep", function="serving:sleep", libraries=("torch", "transformers", "vllm"), seconds=150),
    Check(
        title="Colocated run",
        function="serving:colocated_run",
        libraries=("torch", "transformers", "hydra-core", "ray", "deepspeed", "vllm"),
        seconds=240,
    ),
    Check(title="All-reduce", function="transfers:all_reduce", libraries=("torch",), seconds=90, min_gpus=2),
)


def report() -> Iterator[tuple[str, list[Finding]]]:
    """Yield the title and the findings of each check, in order."""
    gpus, problem = devices()
    if problem or not gpus:
        fact = problem or "nvidia-smi lists no GPU"
        yield "GPUs", [Finding("GPUs", fact, fix="run this on a machine with a GPU and its driver", broken=True)]
        return
    names = ", ".join(f"{gpu.name} ({gpu.memory_gib or 0:.1f} GiB)" for gpu in gpus)
    yield "GPUs", [Finding("GPUs", names)]
    deadline = time.monotonic() + TOTAL_S
    for check in CHECKS:
        yield check.title, run_check(check, gpus, deadline - time.monotonic())


def verdict(broken: int) -> str:
    """Return the last line of the report, with its colour."""
    if broken:
        return f"[bold red]broken: {broken}; a run on these GPUs may fail[/]"
    return "[bold green]every check that ran passed[/]"


def run_check(check: Check, gpus: list[Device], remaining_s: float, device: str = "cuda:0") -> list[Finding]:
    """Run one check within its deadline and the ``remaining_s`` seconds of all checks; never raises."""
    if len(gpus) < check.min_gpus:
        return [Finding("skipped", f"needs {check.min_gpus} GPUs, found {len(gpus)}", skipped=True)]
    if missing := [library for library in check.libraries if installed(library) is None]:
        fact = f"not installed: {', '.join(missing)}"
        return [Finding("skipped", fact, fix=f"pip install {' '.join(missing)}", skipped=True)]
    seconds = min(check.seconds, remaining_s)
    if seconds <= 0:
        return [Finding("skipped", f"the {TOTAL_S:.0f} s for all checks are used up", skipped=True)]
    options = dict(check.options)
    if check.function.endswith(":all_reduce"):
        options |= {"ranks": len(gpus), **data_sheet(gpus[0].name)}
    command = [sys.executable, "-m", "rlflow.commands.doctor.checks", check.function, device, json.dumps(options)]
    began = time.monotonic()
    answer = run_command(command, seconds)
    took = time.monotonic() - began
    if answer.problem:
        return [Finding("failed", f"{answer.problem} (after {took:.0f} s)", broken=True)]
    try:
        return [Finding(**fields) for fields in json.loads(answer.output.splitlines()[-1])]
    except (IndexError, ValueError):
        return [Finding("failed", f"'{' '.join(command[1:3])}' printed no result", broken=True)]


def data_sheet(gpu_name: str) -> dict[str, float | None]:
    """Return this GPU's bandwidths in GB/s from ``conf/gpu``; None where they are unknown."""
    spec: Any = None
    try:
        from rlflow.recipe.compose import cluster_of_hosts

        (spec,) = cluster_of_hosts({"this": [gpu_name]}).gpus.values()
    except (ImportError, ValueError):  # without Hydra, or a GPU that conf/gpu does not know
        pass
    return {name: getattr(spec, name, None) for name in ("link_gb_s", "network_gb_s")}
