"""Hosts and their GPUs: an input of planning."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any

from annotated_types import Ge, Gt

from rlflow.errors import RecipeError
from rlflow.schema import Section, parse

DEFAULT_GPU = "h100_80gb"
MOST_GPUS = 16384
_TERM = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(?:@(\w+))?")


@dataclass(frozen=True, kw_only=True)
class Gpu(Section):
    """A kind of GPU, or the CPU in its place."""

    memory_gib: Annotated[float, Gt(0)] | None = None
    """As the driver reports it; None where memory is the host's own."""
    device_name: str | None = None
    """What nvidia-smi calls it."""
    peak_tflops: Mapping[str, Annotated[float, Gt(0)]] | None = None
    """Of dense matrix products by the type of their numbers, ``float32`` as TF32 where the GPU has it. TFLOP/s."""
    memory_gb_s: Annotated[float, Gt(0)] | None = None
    """From and to its own memory, GB/s."""
    link_gb_s: Annotated[float, Gt(0)] | None = None
    """To the other GPUs of its host, in one direction, GB/s."""
    nvls_channels: Annotated[int, Ge(0)] = 0
    """NCCL channels for NVLink SHARP, each with buffers of its own; 0 where switches cannot add."""
    network_gb_s: Annotated[float, Gt(0)] | None = None
    """To other hosts, in one direction, its usual share, GB/s."""
    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class Host(Section):
    name: str
    gpus: Annotated[int, Ge(1)]
    gpu: str
    """The kind, a key of ``Cluster.gpus``."""
    free: tuple[int, ...] | None = None
    """Ids of the GPUs that may be used, where others are taken; None: all."""
    reserved: bool = False
    """It is there, and no role may use it."""
    memory_gib: Annotated[float, Gt(0)] | None = None
    """The host's own, for what is offloaded or asleep; None: as much as is needed."""
    labels: tuple[str, ...] = ()
    """What a role may ask of its hosts."""

    def has(self, label: str | None) -> bool:
        """A kind of GPU is a label, too."""
        return label is None or label in self.labels or label == self.gpu

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """Ids of the GPUs that roles may use, ascending."""
        if self.reserved:
            return ()
        return tuple(range(self.gpus)) if self.free is None else tuple(sorted(self.free))


@dataclass(frozen=True, kw_only=True)
class Cluster(Section):
    hosts: tuple[Host, ...]
    gpus: Mapping[str, Gpu]
    """The kinds that the hosts have."""

    @property
    def shape(self) -> str:
        """The shortest ``HOSTSxGPUS@KIND`` text for the hosts in their order."""
        runs = [(len(list(run)), *like) for like, run in groupby(self.hosts, lambda host: (host.gpus, host.gpu))]
        return "+".join(f"{count}x{gpus}@{gpu}" for count, gpus, gpu in runs)

    def hosts_with(self, label: str | None) -> tuple[Host, ...]:
        """The hosts that have the label, or are of this kind of GPU; None: all."""
        return tuple(host for host in self.hosts if host.has(label))

    def memory_gib(self, host: Host) -> float | None:
        """Of each of the host's GPUs."""
        return self.gpus[host.gpu].memory_gib


def parse_shape(shape: str) -> list[tuple[int, int, str]]:
    """``7x8+1x7@h200`` as [(hosts, GPUs of each, kind), ...]. Raises RecipeError for any other form."""
    terms = [_TERM.fullmatch(term) for term in shape.split("+")]
    if not all(terms):
        raise RecipeError(
            "cluster",
            f"'{shape}' is neither a cluster of conf/cluster nor a shape",
            fix="write HOSTSxGPUS with numbers from 1, as 2x8, 7x8+1x7 or 2x8@h200",
        )
    if sum(int(term[1]) * int(term[2]) for term in terms if term) > MOST_GPUS:
        raise RecipeError("cluster", f"'{shape}' has more than {MOST_GPUS} GPUs", fix="a smaller shape")
    return [(int(term[1]), int(term[2]), term[3] or DEFAULT_GPU) for term in terms if term]


def cluster_from(mapping: Mapping[str, Any]) -> Cluster:
    """A cluster from its part of the configuration: ``shape`` or ``hosts``, and the figures of its kinds of GPU."""
    fields = dict(mapping)
    if fields.get("shape") is not None and "hosts" in fields:
        raise RecipeError(
            "cluster.hosts",
            f"the hosts follow from the shape {fields['shape']}",
            fix="a file cluster/NAME.yaml with hosts, in a folder given by --config-dir",
        )
    if (shape := fields.pop("shape", None)) is not None:
        kinds = [(gpus, kind) for count, gpus, kind in parse_shape(str(shape)) for _ in range(count)]
        fields["hosts"] = [{"name": f"host-{i}", "gpus": gpus, "gpu": kind} for i, (gpus, kind) in enumerate(kinds)]
    cluster = parse(Cluster, fields, "cluster")
    if not cluster.hosts:
        raise RecipeError("cluster.hosts", "no hosts", fix="name at least one: {name: host-0, gpus: 8, gpu: h200}")
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
        raise RecipeError("cluster.hosts", "processors and GPUs in one cluster", fix="hosts of GPUs, or of processors")
    twice = [name for name, count in Counter(host.name for host in cluster.hosts).items() if count > 1]
    if twice:
        raise RecipeError("cluster.hosts", f"the name '{twice[0]}' is given twice", fix="give every host its own name")
    return cluster


def _check_free(index: int, host: Host) -> None:
    path, ids = f"cluster.hosts.{index}.free", host.free or ()
    for gpu, times in Counter(ids).items():
        if not 0 <= gpu < host.gpus:
            fix = f"ids from 0 to {host.gpus - 1}"
            raise RecipeError(path, f"host '{host.name}' has no GPU {gpu}", known=range(host.gpus), fix=fix)
        if times > 1:
            raise RecipeError(path, f"GPU {gpu} is given {times} times", fix="name each free GPU once")
