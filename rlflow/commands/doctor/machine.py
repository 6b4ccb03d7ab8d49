"""The hardware of this machine: CPU cores, memory, limits, GPUs and the links between them."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from xml.etree import ElementTree

from rlflow.resources.layout import GIB
from rlflow.runtime.ray.cluster.machine import NVIDIA_SMI_SECONDS, ListedGpu, gpu_listing, listed_gpus, run_command
from rlflow.system.host_memory import total_bytes

_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"


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


def machine() -> Machine:
    """Return the resources that this process may use."""
    return Machine(cores=_cores(), memory_gib=total_bytes() / GIB, shared_gib=_shared_gib(), open_files=_open_files())


def devices() -> tuple[list[Device], str | None]:
    """Return the GPUs of this machine, and why they are unknown if they are. Without NVIDIA's driver there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], None
    listing = run_command(
        ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"], NVIDIA_SMI_SECONDS
    )
    if listing.problem:
        return [], listing.problem
    # In a container this may not list other processes; the memory in use still shows them.
    users = run_command(["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"], NVIDIA_SMI_SECONDS)
    gpu_devices = devices_from(listing.output, "" if users.problem else users.output)
    gpus = listed_gpus(gpu_listing())
    if any(gpu.slices for gpu in gpus):
        details = run_command(["nvidia-smi", "-q", "-x"], NVIDIA_SMI_SECONDS)
        gpu_devices = with_slices(gpu_devices, gpus, "" if details.problem else details.output)
    return gpu_devices, None


def devices_from(listing: str, users: str) -> list[Device]:
    """Parse two outputs of nvidia-smi: a line for each GPU, and the uuid of its GPU for each process."""
    processes = Counter(line.strip() for line in users.splitlines())
    gpu_devices = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_GPU_FIELDS.split(",")) and fields[0].isdigit():
            index, uuid, name, total, used, driver = fields
            gpu_devices.append(Device(int(index), name, _gib(total), _gib(used), driver, processes[uuid]))
    return gpu_devices


def with_slices(gpu_devices: Sequence[Device], gpus: Sequence[ListedGpu], details: str) -> list[Device]:
    """Replace each partitioned GPU by its slices, with their own memory from ``nvidia-smi -q -x``."""
    slices = {int(gpu.index): gpu.slices for gpu in gpus}
    memory = _slice_memory(details)
    result: list[Device] = []
    for device in gpu_devices:
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
    answer = run_command(["nvidia-smi", "topo", "-m"], NVIDIA_SMI_SECONDS)
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
