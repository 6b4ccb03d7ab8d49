"""The hardware of this machine: CPU cores, memory, limits, GPUs and the links between them."""

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from xml.etree import ElementTree

from rlflow.system.host_memory import total_bytes

GIB = 2**30
# Seconds that nvidia-smi may take; a first call without a persistent driver takes several.
_NVIDIA_SMI_SECONDS = 20
_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"
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


@dataclass(frozen=True)
class Device:
    """A GPU of this machine, or a slice of one, as nvidia-smi reports it."""

    index: int
    name: str
    memory_gib: float | None
    used_gib: float | None
    """The memory that all processes use; None when the driver does not report it, as for ``memory_gib``."""
    driver: str
    processes: int
    """The number of processes that compute on it."""
    slice: int | None = None
    """The number among the slices of GPU ``index``; None for a GPU that is not partitioned."""


@dataclass(frozen=True)
class Machine:
    """The resources that this process may use."""

    cores: int
    memory_gib: float
    """The memory of the machine, or the limit of the container."""
    shared_gib: float | None
    """The free room in /dev/shm; None without /dev/shm."""
    open_files: tuple[int, int] | None
    """The soft and the hard limit; None without a limit."""


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


def machine() -> Machine:
    """Return the resources that this process may use."""
    return Machine(cores=_cores(), memory_gib=total_bytes() / GIB, shared_gib=_shared_gib(), open_files=_open_files())


def gpus_of_this_machine() -> list[str]:
    """Return the names of the GPUs that this process may use, from nvidia-smi; empty without any."""
    return gpus_from(gpu_listing(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_listing() -> str:
    """Return the output of ``nvidia-smi -L``, which lists each GPU and its MIG slices; empty without nvidia-smi."""
    answer = run_command(["nvidia-smi", "-L"], _NVIDIA_SMI_SECONDS)
    return "" if answer.problem else answer.output


def listed_gpus(listing: str) -> list[ListedGpu]:
    """Parse the output of ``nvidia-smi -L``."""
    found: list[ListedGpu] = []
    for line in listing.splitlines():
        if gpu := _GPU_LINE.fullmatch(line.strip()):
            index, name, uuid = gpu.groups()
            found.append(ListedGpu(index, uuid, name))
        elif found and (part := _SLICE_LINE.fullmatch(line.strip())):
            profile, number, uuid = part.groups()
            last = found[-1]
            slice_ = GpuSlice(int(number), uuid, f"{last.name} MIG {profile}")
            found[-1] = replace(last, slices=(*last.slices, slice_))
    return found


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


def devices() -> tuple[list[Device], str | None]:
    """Return the GPUs of this machine, and why they are unknown if they are. Without NVIDIA's driver there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], None
    listing = run_command(
        ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"], _NVIDIA_SMI_SECONDS
    )
    if listing.problem:
        return [], listing.problem
    # In a container this may not list other processes; the memory in use still shows them.
    users = run_command(["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"], _NVIDIA_SMI_SECONDS)
    found = devices_from(listing.output, "" if users.problem else users.output)
    gpus = listed_gpus(gpu_listing())
    if any(gpu.slices for gpu in gpus):
        details = run_command(["nvidia-smi", "-q", "-x"], _NVIDIA_SMI_SECONDS)
        found = with_slices(found, gpus, "" if details.problem else details.output)
    return found, None


def devices_from(listing: str, users: str) -> list[Device]:
    """Parse two outputs of nvidia-smi: a line for each GPU, and the uuid of its GPU for each process."""
    processes = Counter(line.strip() for line in users.splitlines())
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_GPU_FIELDS.split(",")) and fields[0].isdigit():
            index, uuid, name, total, used, driver = fields
            found.append(Device(int(index), name, _gib(total), _gib(used), driver, processes[uuid]))
    return found


def with_slices(found: Sequence[Device], gpus: Sequence[ListedGpu], details: str) -> list[Device]:
    """Replace each partitioned GPU by its slices, with their own memory from ``nvidia-smi -q -x``."""
    slices = {int(gpu.index): gpu.slices for gpu in gpus}
    memory = _slice_memory(details)
    result: list[Device] = []
    for device in found:
        parts = [
            replace(device, name=part.name, slice=part.number, memory_gib=total, used_gib=used, processes=0)
            for part in slices.get(device.index, ())
            for total, used in [memory.get((device.index, part.number), (None, None))]
        ]
        result += parts or [device]
    return result


def _slice_memory(details: str) -> dict[tuple[int, int], tuple[float | None, float | None]]:
    """Return the total and used GiB of each slice by the numbers of its GPU and of the slice."""
    try:
        gpus = ElementTree.fromstring(details).findall("gpu")
    except ElementTree.ParseError:
        return {}
    return {
        (index, int(part.findtext("index", "0"))): (
            _gib(part.findtext("fb_memory_usage/total", "").removesuffix(" MiB")),
            _gib(part.findtext("fb_memory_usage/used", "").removesuffix(" MiB")),
        )
        for index, gpu in enumerate(gpus)
        for part in gpu.iterfind("mig_devices/mig_device")
    }


def links() -> "Counter[str]":
    """Count the pairs of this machine's GPUs by the kind of their link; empty when nvidia-smi does not report them."""
    answer = run_command(["nvidia-smi", "topo", "-m"], _NVIDIA_SMI_SECONDS)
    return Counter() if answer.problem else links_from(answer.output)


def links_from(topology: str) -> "Counter[str]":
    """Parse the output of ``nvidia-smi topo -m``.

    Kinds are ``NV18`` (18 NVLinks), or over PCIe ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``, from near to far.
    """
    rows = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines():
        name, *cells = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) and "X" in cells:
            rows.append(cells)
    # The GPUs' columns come first, in the order of their rows.
    return Counter(rows[one][other] for one, other in combinations(range(len(rows)), 2))


def _gib(mib: str) -> float | None:
    """Parse a number of MiB; None for ``[N/A]`` and the like."""
    return int(mib) / 1024 if mib.isdigit() else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shared_gib() -> float | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").free / GIB
    return None


def _open_files() -> tuple[int, int] | None:
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else (soft, hard)
