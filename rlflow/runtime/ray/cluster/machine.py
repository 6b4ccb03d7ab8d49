"""The GPUs of this machine that a process may use, from nvidia-smi, and commands that may hang."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

# Seconds that nvidia-smi may take; a first call without a persistent driver takes several.
NVIDIA_SMI_SECONDS = 20
_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (\S+)\)")
_SLICE_LINE = re.compile(r"MIG (\S+)\s+Device\s+(\d+): \(UUID: (\S+)\)")
PCI_ORDER: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The environment of every process that uses GPUs. By default CUDA counts the fastest GPU first, while nvidia-smi, NVML
and Ray count by the bus."""


@dataclass(frozen=True)
class CommandOutput:
    """The output of a command, or why it gave none."""

    output: str = ""
    problem: str | None = None


@dataclass(frozen=True)
class GpuSlice:
    """A slice of a GPU that is partitioned by MIG: for CUDA a GPU of its own."""

    number: int
    """Its position among the slices of the GPU."""
    uuid: str
    name: str
    """The GPU's name and the slice's profile: ``NVIDIA A100-SXM4-40GB MIG 3g.20gb``."""


@dataclass(frozen=True)
class ListedGpu:
    """A GPU in the output of ``nvidia-smi -L``."""

    index: str
    uuid: str
    name: str
    slices: tuple[GpuSlice, ...] = ()

    @property
    def device_name(self) -> str:
        """Return the name of the device with this number for CUDA: of a partitioned GPU, its first slice."""
        return self.slices[0].name if self.slices else self.name


def run_command(command: Sequence[str], seconds: float) -> CommandOutput:
    """Run a command for at most ``seconds``. Raises nothing.

    A process that hangs in a driver survives even SIGKILL, so its end is not waited for.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CommandOutput(problem=f"{command[0]} does not start: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return CommandOutput(problem=f"no answer within {seconds:g} s")
    if process.returncode:
        lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        return CommandOutput(output, lines[-1] if lines else f"it ended with {process.returncode}")
    return CommandOutput(output)


def gpus_of_this_machine() -> list[str]:
    """Return the names of the GPUs that this process may use, from nvidia-smi; empty without any."""
    return gpus_from(gpu_listing(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_listing() -> str:
    """Return the output of ``nvidia-smi -L``, which lists each GPU and its MIG slices; empty without nvidia-smi."""
    answer = run_command(["nvidia-smi", "-L"], NVIDIA_SMI_SECONDS)
    return "" if answer.problem else answer.output


def listed_gpus(listing: str) -> list[ListedGpu]:
    """Parse the output of ``nvidia-smi -L``."""
    gpus: list[ListedGpu] = []
    for line in listing.splitlines():
        if gpu := _GPU_LINE.fullmatch(line.strip()):
            index, name, uuid = gpu.groups()
            gpus.append(ListedGpu(index, uuid, name))
        elif gpus and (part := _SLICE_LINE.fullmatch(line.strip())):
            profile, number, uuid = part.groups()
            last = gpus[-1]
            slice_ = GpuSlice(int(number), uuid, f"{last.name} MIG {profile}")
            gpus[-1] = replace(last, slices=(*last.slices, slice_))
    return gpus


def gpus_from(listing: str, visible: str | None) -> list[str]:
    """Return the names of the devices that CUDA_VISIBLE_DEVICES lets a process see; None: all.

    As in CUDA an unknown id ends the list, a uuid may be cut short, and the number of a partitioned GPU means its
    first slice; the other slices only have uuids.
    """
    gpus = listed_gpus(listing)
    if visible is None:
        return [gpu.device_name for gpu in gpus]
    names = []
    for wanted in visible.split(","):
        if (name := _name_of(gpus, wanted.strip())) is None:
            break
        names.append(name)
    return names


def _name_of(gpus: Sequence[ListedGpu], id_: str) -> str | None:
    for gpu in gpus:
        if id_ == gpu.index or (id_.startswith("GPU-") and gpu.uuid.startswith(id_)):
            return gpu.device_name
        for slice_ in gpu.slices:
            if id_.startswith("MIG-") and slice_.uuid.startswith(id_):
                return slice_.name
    return None
