"""A cluster: its hosts and their GPUs, an input of planning."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from rlflow.errors import RecipeError, did_you_mean
from rlflow.schema import Count, CountOrZero, Section, parse

DEFAULT_GPU = "h100_80gb"
MOST_GPUS = 16384
# Sizes and rates of any machine lie within these limits; arithmetic overflows on numbers such as 1e300.
_Size = Annotated[float, Gt(0), Le(1e7)]
_GpuMemory = Annotated[float, Gt(0), Le(10_000)]
_Rate = Annotated[float, Ge(1e-9), Le(1e9)]
_TERM = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(?:@(\w+))?")


@dataclass(frozen=True, kw_only=True)
class Gpu(Section):
    """A kind of GPU, or of CPU."""

    memory_gib: _GpuMemory | None = None
    """Memory as the driver reports it; null for CPUs, which use the host's memory."""
    device_name: str | None = None
    """The name that nvidia-smi shows."""
    peak_tflops: Mapping[str, _Rate] | None = None
    """Dense matrix products in TFLOP/s, by number type; ``float32`` is TF32 where the GPU has it."""
    sustained: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of ``peak_tflops`` that its power allows for long, while matrix products lower the clock.

    H100 and H200: 0.8, fitted to published training steps (prime-rl, torchtitan, verl), which reach that much less of
    the peak than those on A100 and H20."""
    memory_gb_s: _Rate | None = None
    """Bandwidth of its own memory in GB/s."""
    link_gb_s: _Rate | None = None
    """Bandwidth to the other GPUs of its host, in one direction, in GB/s."""
    nvls_channels: CountOrZero = 0
    """NCCL channels for NVLink SHARP, each with its own buffers; 0 where the switches cannot reduce."""
    condition: str | None = None
    """A condition under which rlflow runs on it, which plans state; null if there is none."""
    network_gb_s: _Rate | None = None
    """Its usual share of the bandwidth to other hosts, in one direction, in GB/s."""
    price_per_hour: Annotated[float, Ge(0), Le(1e9)] | None = None
    """Price of one GPU for an hour, with its share of the host, in any currency."""
    source: str
    """The source of these figures."""


@dataclass(frozen=True, kw_only=True)
class Host(Section):
    """A machine with GPUs of one kind."""

    name: str
    """The name of the machine."""
    gpus: Count
    """The number of its GPUs."""
    gpu: str
    """The kind of its GPUs, a key of ``cluster.gpus``."""
    free: tuple[int, ...] | None = None
    """Ids of the GPUs that may be used, if others are taken; null: all."""
    reserved: bool = False
    """No role may use this host."""
    memory_gib: _Size | None = None
    """The host's memory, for offloaded and sleeping roles; null: unknown, and assumed to equal that of its GPUs."""
    cpus: Count | None = None
    """The number of its CPU cores, with which plans compare what agents need; null: unknown."""
    labels: tuple[str, ...] = ()
    """Labels that a role may ask for."""

    def has(self, label: str) -> bool:
        """Return whether the host has a label; its kind of GPU counts as one."""
        return label in self.labels or label == self.gpu

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """Return the ids of the GPUs that roles may use, in ascending order."""
        if self.reserved:
            return ()
        return tuple(range(self.gpus)) if self.free is None else tuple(sorted(self.free))


@dataclass(frozen=True, kw_only=True)
class Cluster(Section):
    """Hosts, and the figures of their kinds of GPU."""

    hosts: tuple[Host, ...]
    gpus: Mapping[str, Gpu]
    """The kinds of GPU, by name."""

    @property
    def shape(self) -> str:
        """Return the shortest ``HOSTSxGPUS@KIND`` text that describes the hosts in order."""
        runs = [(len(list(run)), *like) for like, run in groupby(self.hosts, lambda host: (host.gpus, host.gpu))]
        return "+".join(f"{count}x{gpus}@{gpu}" for count, gpus, gpu in runs)

    def computes_in(self, host: Host, dtype: str) -> bool:
        """Return whether the host's GPUs compute in a number type; without figures they are taken to."""
        peaks = self.gpus[host.gpu].peak_tflops
        return peaks is None or dtype in peaks

    def memory_gib(self, host: Host) -> float | None:
        """Return the memory of each of the host's GPUs."""
        return self.gpus[host.gpu].memory_gib

    def peak_flops(self, hosts: Collection[str]) -> float | None:
        """Return the operations per second of the slowest GPU on hosts with these names; None for CPUs.

        This is the peak of the data sheet, by which others compare, and not what the GPU's power sustains.
        """
        kinds = [self.gpus[host.gpu] for host in self.hosts if host.name in hosts]
        sheets = [kind.peak_tflops or {} for kind in kinds if kind.memory_gib is not None]
        peaks = [sheet.get("bfloat16") or sheet.get("float16") or sheet.get("float32") or 0.0 for sheet in sheets]
        return 1e12 * min(peaks, default=0.0) or None


def parse_shape(shape: str) -> list[tuple[int, int, str]]:
    """Parse ``7x8+1x7@h200`` into [(hosts, GPUs of each, kind), ...]. Raises RecipeError for any other form."""
    terms = [_TERM.fullmatch(term) for term in shape.split("+")]
    if not all(terms):
        raise RecipeError(
            "cluster",
            f"'{shape}' is neither a file in conf/cluster nor a shape",
            fix="write HOSTSxGPUS with numbers from 1, as 2x8, 7x8+1x7 or 2x8@h200",
        )
    if sum(int(term[1]) * int(term[2]) for term in terms if term) > MOST_GPUS:
        raise RecipeError("cluster", f"'{shape}' has more than {MOST_GPUS} GPUs", fix="a smaller shape")
    return [(int(term[1]), int(term[2]), term[3] or DEFAULT_GPU) for term in terms if term]


def cluster_from(mapping: Mapping[str, Any]) -> Cluster:
    """Build a cluster from its part of the configuration: ``shape`` or ``hosts``, and figures of GPUs.

    Raises RecipeError.
    """
    fields = dict(mapping)
    if fields.get("shape") is not None and "hosts" in fields:
        raise RecipeError(
            "cluster.hosts",
            f"the hosts follow from the shape {fields['shape']}",
            fix="a file cluster/NAME.yaml with hosts, in a folder given by --config-dir",
        )
    if (shape := fields.pop("shape", None)) is not None:
        kinds = [(gpus, kind) for count, gpus, kind in parse_shape(str(shape)) for _ in range(count)]
        _check_unused(fields.get("gpus"), {kind for _, kind in kinds})
        fields["hosts"] = [{"name": f"host-{i}", "gpus": gpus, "gpu": kind} for i, (gpus, kind) in enumerate(kinds)]
    cluster = parse(Cluster, fields, "cluster")
    if not cluster.hosts:
        raise RecipeError("cluster.hosts", "no hosts", fix="name at least one: {name: host-0, gpus: 8, gpu: h200}")
    if sum(host.gpus for host in cluster.hosts) > MOST_GPUS:
        raise RecipeError("cluster.hosts", f"have more than {MOST_GPUS} GPUs", fix="fewer or smaller hosts")
    for index, host in enumerate(cluster.hosts):
        if host.gpu not in cluster.gpus:
            raise RecipeError(
                f"cluster.hosts.{index}.gpu",
                f"no figures for '{host.gpu}'",
                known=sorted(cluster.gpus),
                fix=f"add '- /gpu@gpus.{host.gpu}: {host.gpu}' to the cluster's defaults, or cluster.gpus.{host.gpu}",
            )
        _check_free(index, host)
    if not any(host.usable for host in cluster.hosts):
        raise RecipeError(
            "cluster.hosts", "no GPU may be used: every host is reserved or has no free GPU", fix="leave one free"
        )
    if len({cluster.memory_gib(host) is None for host in cluster.hosts}) > 1:
        raise RecipeError(
            "cluster.hosts", "some hosts have GPUs and others only CPUs", fix="hosts of GPUs, or hosts of CPUs"
        )
    repeated = [name for name, count in Counter(host.name for host in cluster.hosts).items() if count > 1]
    if repeated:
        raise RecipeError(
            "cluster.hosts", f"the name '{repeated[0]}' is used twice", fix="give every host its own name"
        )
    return cluster


def _check_unused(gpus: object, used: Collection[str]) -> None:
    """Raise RecipeError for changes to a kind of GPU that no host has, which are no complete figures by themselves."""
    for kind, figures in gpus.items() if isinstance(gpus, Mapping) else ():
        if kind not in used and isinstance(figures, Mapping) and "source" not in figures:
            fix = did_you_mean(str(kind), used) or "change the figures of a known kind"
            raise RecipeError(f"cluster.gpus.{kind}", f"no host has the kind '{kind}'", known=sorted(used), fix=fix)


def _check_free(index: int, host: Host) -> None:
    path, ids = f"cluster.hosts.{index}.free", host.free or ()
    for gpu, times in Counter(ids).items():
        if not 0 <= gpu < host.gpus:
            fix = f"ids from 0 to {host.gpus - 1}"
            raise RecipeError(path, f"host '{host.name}' has no GPU {gpu}", known=range(host.gpus), fix=fix)
        if times > 1:
            raise RecipeError(path, f"GPU {gpu} is given {times} times", fix="name each free GPU once")
