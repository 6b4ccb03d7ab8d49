"""What a role asks for, and how it is cut up over its GPUs."""

from dataclasses import dataclass
from math import gcd
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.model import Count
from rlflow.schema import Section

T = TypeVar("T")
Auto = Literal["auto"]
GIB = 2**30

# Of a GPU's memory for the weights of an engine that is free to choose its tensor-parallel size.
_WEIGHTS_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Resources(Section):
    """What a role may pin. What is ``auto`` the planner decides; a value is a constraint."""

    gpus: Count | Auto = "auto"
    colocate: tuple[str, ...] | Auto = "auto"
    """Roles that use the same GPUs; ``[]``: GPUs of its own."""
    tensor_parallel_size: Count | Auto = "auto"
    pipeline_parallel_size: Count | Auto = "auto"
    data_parallel_size: Count | Auto = "auto"
    sequence_parallel_size: Count | Auto = "auto"
    zero_stage: Annotated[int, Ge(0), Le(3)] | Auto = "auto"
    offload: Literal["none", "optimizer", "weights"] | Auto = "auto"
    micro_batch_tokens: Count | Auto = "auto"
    """Tokens that go through the model at once."""
    gradient_checkpointing: bool | Auto = "auto"
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | Auto = "auto"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one role asks for."""

    role: str
    engine: str
    parallel: frozenset[str]
    """The ways in which the engine can be spread: tensor, pipeline, data, sequence."""
    trains: bool
    generates: bool
    weight_bytes: int | None
    """None for a model whose figures are not known."""
    num_attention_heads: int | None
    """None likewise; a tensor-parallel group divides them."""
    wants: Resources

    @property
    def pipeline_parallel_size(self) -> int:
        return _or(self.wants.pipeline_parallel_size, 1)

    @property
    def sequence_parallel_size(self) -> int:
        return _or(self.wants.sequence_parallel_size, 1)

    @property
    def num_workers(self) -> int | None:
        """Where it is pinned: data- times sequence-parallel. An engine that cannot be spread has one."""
        if "data" not in self.parallel:
            return 1
        degree = self.wants.data_parallel_size
        return None if degree == "auto" else degree * self.sequence_parallel_size

    def wanted_gpus(self, tensor_parallel_size: int) -> int | None:
        """The size of its pool where the role pins it. Raises PlacementError for sizes that contradict each other."""
        group = tensor_parallel_size * self.pipeline_parallel_size
        workers, gpus = self.num_workers, self.wants.gpus
        if gpus == "auto":
            return None if workers is None or "data" not in self.parallel else group * workers
        if gpus % (group * self.sequence_parallel_size) or (workers is not None and workers * group != gpus):
            degrees = f"tensor_parallel_size {tensor_parallel_size}"
            degrees += f", pipeline_parallel_size {self.pipeline_parallel_size}"
            degrees += f", {workers} workers" if workers is not None else ""
            raise PlacementError(
                f"roles.{self.role}.gpus",
                f"{gpus} GPUs cannot be used whole with {degrees}",
                fix=f"gpus {group * workers}" if workers else f"a multiple of {group * self.sequence_parallel_size}",
            )
        return gpus


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every degree that was chosen. None: the engine has no such thing."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    sequence_parallel_size: int
    zero_stage: int | None
    offload: str | None
    micro_batch_tokens: int
    gradient_checkpointing: bool
    gpu_memory_utilization: float | None


def tensor_parallel_size(demand: Demand, cluster: Cluster) -> int:
    """As pinned; else the smallest power of two with which the weights take a quarter of a GPU at most.

    Raises PlacementError for a degree that the engine or the hosts cannot have.
    """
    for name in ("tensor", "pipeline", "data", "sequence"):
        degree = getattr(demand.wants, f"{name}_parallel_size")
        if degree not in ("auto", 1) and name not in demand.parallel:
            raise PlacementError(
                f"roles.{demand.role}.{name}_parallel_size",
                f"{degree} is asked for, and engine '{demand.engine}' cannot be {name}-parallel",
                fix=f"{name}_parallel_size=1, or another engine",
            )
    largest = max(host.gpus for host in cluster.hosts)
    pinned = demand.wants.tensor_parallel_size
    if pinned != "auto" and pinned > largest:
        raise PlacementError(
            f"roles.{demand.role}",
            f"no host has {pinned} GPUs for one tensor-parallel group ({pinned} asked, hosts have {largest})",
            fix=_smaller_groups(pinned, largest, "pipeline" in demand.parallel),
        )
    if pinned != "auto" and demand.num_attention_heads is not None and demand.num_attention_heads % pinned:
        raise PlacementError(
            f"roles.{demand.role}.tensor_parallel_size",
            f"{pinned} GPUs cannot share the model's {demand.num_attention_heads} attention heads evenly",
            fix=f"tensor_parallel_size {gcd(pinned, demand.num_attention_heads)}",
        )
    memory = min((memory for host in cluster.hosts if (memory := cluster.memory_gib(host))), default=None)
    if pinned != "auto" or "tensor" not in demand.parallel or demand.weight_bytes is None or memory is None:
        return _or(pinned, 1)
    weights_gib = demand.weight_bytes / demand.pipeline_parallel_size / GIB
    size = 1
    heads = demand.num_attention_heads or 0
    while size * 2 <= largest and heads % (size * 2) == 0 and weights_gib / size > _WEIGHTS_SHARE * memory:
        size *= 2
    if weights_gib / size > memory:
        raise PlacementError(
            f"roles.{demand.role}",
            f"weights of {weights_gib:.0f} GiB do not fit {size} GPUs of {memory:g} GiB",
            fix="a larger pipeline_parallel_size, larger hosts, or a smaller model",
        )
    return size


def _smaller_groups(asked: int, largest: int, can_pipeline: bool) -> str:
    fitting = 1 << (largest.bit_length() - 1)
    stages = next((n for n in range(2, asked + 1) if asked % n == 0 and asked // n <= largest), None)
    way_out = f"tensor_parallel_size {fitting}"
    if can_pipeline and stages is not None:
        way_out += f", or pipeline_parallel_size {stages} with {asked // stages} each"
    return way_out


def choose_layout(demand: Demand, size: int, num_workers: int, *, colocated: bool, cluster: Cluster) -> Layout:
    """The degrees that are placed, and simple rules for what is left open."""
    wants = demand.wants
    on_gpu = cluster.memory_gib(cluster.hosts[0]) is not None
    sharded = demand.trains and "data" in demand.parallel
    serves = on_gpu and demand.generates and "tensor" in demand.parallel
    return Layout(
        tensor_parallel_size=size,
        pipeline_parallel_size=demand.pipeline_parallel_size,
        data_parallel_size=num_workers // demand.sequence_parallel_size,
        sequence_parallel_size=demand.sequence_parallel_size,
        zero_stage=_or(wants.zero_stage, 3) if sharded else None,
        offload=_or(wants.offload, "none") if sharded else None,
        micro_batch_tokens=_or(wants.micro_batch_tokens, 16384 if on_gpu else 2048),
        gradient_checkpointing=_or(wants.gradient_checkpointing, on_gpu) and demand.trains,
        gpu_memory_utilization=_or(wants.gpu_memory_utilization, 0.6 if colocated else 0.9) if serves else None,
    )


def _or(value: T | Auto, default: T) -> T:
    return default if value == "auto" else value
