"""A pool: roles that share GPUs, the hosts they may use, what each role chooses, and what it holds while idle."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout, Offload
from rlflow.resources.memory.overheads import Sharp, asleep_terms, process_terms, sync_terms
from rlflow.resources.memory.phases import host_terms, score_terms, usable_gib
from rlflow.resources.memory.state import Terms, TrainingMemory, persistent_buffers, state_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import MEMORY_BANDS, Band, Margin, kind_of
from rlflow.resources.time.calibration import Calibration, default_efficiency, engine_key
from rlflow.resources.time.speed import Speed, gpu_speed, slowest
from rlflow.resources.workload import Workload


@dataclass(frozen=True)
class HostSet:
    """The hosts that a pool may use, reduced to what its roles must know."""

    hosts: tuple[Host, ...]
    memory_gib: float | None
    """Memory of the smallest GPU; None for CPUs, whose memory is not modelled."""
    speed: Speed
    """The slowest speed in each respect."""
    host_gib: float
    """Host memory for each GPU, on the host that states least."""
    assumed_host_gib: float
    """The same for hosts that do not state theirs: as much as their GPUs have, which is less than machines have."""
    sharp: Sharp
    """The largest buffers for NVLink SHARP on any of the hosts."""

    @property
    def usable_gib(self) -> float:
        """Return the memory of each GPU that a plan may use."""
        return usable_gib(self.memory_gib) if self.memory_gib is not None else float("inf")

    @cached_property
    def num_gpus(self) -> int:
        """Return the number of usable GPUs."""
        return sum(len(host.usable) for host in self.hosts)

    @cached_property
    def largest_host(self) -> int:
        """Return the number of usable GPUs of the largest host."""
        return max(len(host.usable) for host in self.hosts)

    def groups(self, size: int) -> int:
        """Return how many groups of ``size`` GPUs fit, each inside a host."""
        return sum(len(host.usable) // size for host in self.hosts)


def select_hosts(cluster: Cluster, labels: Collection[str], calibration: Calibration) -> HostSet:
    """Return the hosts with all labels. Raises PlacementError when there are none, or when figures are missing."""
    labelled = [host for host in cluster.hosts if all(host.has(label) for label in labels)]
    named = ("label " if len(labels) == 1 else "labels ") + " and ".join(f"'{label}'" for label in sorted(labels))
    if not labelled:
        names = sorted({name for host in cluster.hosts for name in (*host.labels, host.gpu)})
        raise PlacementError("label", f"no host has the {named}", known=names, fix="use one of these")
    hosts = tuple(host for host in labelled if host.usable)
    if not hosts:
        fact = f"the hosts with the {named} are reserved, or have no free GPU"
        raise PlacementError("label", fact, fix="other labels, or a cluster with more free GPUs")
    kinds = {host.gpu for host in hosts}
    speeds = [
        gpu_speed(
            cluster.gpus[kind],
            max(host.gpus for host in hosts if host.gpu == kind),
            calibration.get(kind) or default_efficiency(cluster.gpus[kind]),
            engines={
                key.partition("/")[2]: own for key, own in calibration.items() if key.startswith(engine_key(kind, ""))
            },
            share=1 / sum(host.gpus for host in cluster.hosts) if cluster.gpus[kind].memory_gib is None else 1.0,
        )
        for kind in sorted(kinds)
    ]
    memories = [memory for kind in kinds if (memory := cluster.gpus[kind].memory_gib) is not None]
    stated = [host.memory_gib / len(host.usable) for host in hosts if host.memory_gib is not None]
    assumed = [gib for host in hosts if host.memory_gib is None and (gib := cluster.memory_gib(host)) is not None]
    sharp = Sharp(max(cluster.gpus[kind].nvls_channels for kind in kinds), max(host.gpus for host in hosts))
    return HostSet(
        hosts, min(memories, default=None), slowest(speeds), min(stated, default=inf), min(assumed, default=inf), sharp
    )


# Micro-batches on CPUs, where memory is not modelled.
CPU_MICRO_BATCH_TOKENS = 2048


# torch rounds every piece of memory that GPUs read directly up to a power of two (ATen/core/CachingHostAllocator.h), so
# that vLLM's copies of weights take up to twice their size. Other offloaded state is in pieces of such a size.
PINNED = 2


@dataclass(frozen=True)
class PoolPolicy:
    """A decision for all roles of a pool: what stays on the GPUs while others work."""

    sleeps: bool = False
    """Trained and scoring roles move their state to the host's memory."""
    zero_stage: int = 3
    """The ZeRO stage of trained roles."""
    offload: Offload = "none"
    """The state that trained roles offload; ``weights`` applies to scoring roles too."""
    shards_scorers: bool = True
    """Models that only score are sharded, instead of complete on every GPU."""


@dataclass(frozen=True)
class Pool:
    """Roles that use the same GPUs, one after another."""

    demands: tuple[Demand, ...]
    gpus: int
    groups: Callable[[int], int]
    """Return how many groups of a size the pool's GPUs have, each inside a host."""
    host_set: HostSet
    largest_group: int

    @property
    def shared(self) -> bool:
        """Return whether several roles use the pool."""
        return len(self.demands) > 1

    @property
    def counts_memory(self) -> bool:
        """Return whether memory is modelled."""
        return self.host_set.memory_gib is not None


@dataclass(frozen=True)
class RoleChoice:
    """One role's use of its pool."""

    layout: Layout
    phase: str
    """The phase in which it needs most memory: generate, score or update."""
    awake: Terms
    """GiB on each of its GPUs in that phase."""
    idle: Terms
    """GiB on each of its GPUs while other roles work."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of each of its nodes."""
    kv_tokens: float | None = None
    """Tokens in the KV cache of one engine."""
    concurrency: float | None = None
    """Sequences that one engine generates at once."""
    margin: Margin = Margin.SAFE
    """The room that is left for the error of its predicted memory."""


@dataclass(frozen=True)
class Shortage:
    """The missing memory of the option that came nearest to fitting."""

    role: str
    gib: float
    what: str

    def __str__(self) -> str:
        return f"{self.role}: {self.what}"


def base_layout(demand: Demand, policy: PoolPolicy, pool: Pool) -> Layout:
    """Return the layout of a trained or scoring role without what depends on the memory that is left."""
    wants = demand.pins
    spread = "data" in demand.parallel
    stage = policy.zero_stage if demand.trains else (3 if policy.shards_scorers else 0)
    size = (demand.pinned("tensor_parallel_size") or 1) * (demand.pinned("pipeline_parallel_size") or 1)
    sequence = demand.pinned("sequence_parallel_size") or 1
    copies = demand.pinned("data_parallel_size") or max(1, pool.groups(size * sequence))
    # A model that only scores can offload nothing except its weights.
    offload: Offload = policy.offload if demand.trains or policy.offload == "weights" else "none"
    return Layout(
        tensor_parallel_size=demand.pinned("tensor_parallel_size") or 1,
        pipeline_parallel_size=demand.pinned("pipeline_parallel_size") or 1,
        data_parallel_size=copies,
        sequence_parallel_size=sequence,
        zero_stage=(stage if wants.zero_stage == "auto" else wants.zero_stage) if spread else None,
        offload=(offload if wants.offload == "auto" else wants.offload) if spread else None,
        micro_batch_tokens=CPU_MICRO_BATCH_TOKENS,
        sleeps=policy.sleeps and pool.shared and spread and not demand.generates,
    )


def memory_band(demand: Demand, layout: Layout) -> Band:
    """Return the error band of a GPU's memory while a role works.

    An engine takes exactly what it is given. Its band is that of the idle roles on as many GPUs.
    """
    return MEMORY_BANDS[kind_of(layout, demand.training)]


def available_gib(demand: Demand, pool: Pool, beside: float, error: float) -> float:
    """Return the memory that the role may take on each GPU if predictions are wrong by the factor ``error``.

    ``beside`` are the GiB of idle roles. Beside an engine, only theirs can be wrong.
    """
    usable = pool.host_set.usable_gib
    return usable - error * beside if demand.generates and not demand.trains else usable / error - beside


def idle_terms(demand: Demand, policy: PoolPolicy, pool: Pool) -> Terms:
    """Return what the role holds on its GPUs while others work, after torch has released its cache."""
    model, sharp = demand.architecture, pool.host_set.sharp
    if not pool.shared or model is None or not pool.counts_memory:
        return {}
    serves = demand.generates and not demand.trains
    if serves and "tensor" in demand.parallel:
        width = demand.pinned("tensor_parallel_size") or pool.largest_group
        return asleep_terms(model, width, sharp, eager=demand.pins.eager is True)
    layout = base_layout(demand, policy, pool)
    process = process_terms(layout, sharp)
    if layout.sleeps:
        return process
    if demand.trains:
        return process | idle_state(model, layout, demand.training)
    if serves:
        # This engine cannot sleep.
        return process | {"weights": model.num_parameters * demand.weight_bytes / GIB}
    return process | {"weights": score_terms(model, layout, 0, weight_bytes=demand.weight_bytes)["weights"]}


def idle_state(model: Architecture, layout: Layout, training: TrainingMemory) -> dict[str, float]:
    """Return the state of a trained role between its steps."""
    state = dict(state_terms(model, layout, training))
    if not training.keeps_gradients:
        state["gradients"] = 0.0
    return state | persistent_buffers(layout, training)


def host_memory(demand: Demand, choice: RoleChoice, workload: Workload) -> Terms:
    """Return host memory for each of the role's GPUs: offloaded and sleeping state, and its part of the data.

    Its outputs count twice, in its own process and in the object store; its inputs count once.
    """
    model, layout = demand.architecture, choice.layout
    if model is None or not choice.awake:
        return {}
    data = (2 * workload.bytes_made_by(demand.role) + workload.bytes_read_by(demand.role)) / layout.num_gpus / GIB
    if demand.trains:
        return host_terms(model, layout, demand.training, offloads=layout.sleeps, data_gib=data)
    if demand.generates:
        # vLLM's sleep keeps the weights in the host's memory unless a weight sync replaces all of them.
        replaced = demand.follows_lora is None and demand.role in {sync.target for sync in workload.copies}
        sleeping = 0.0 if replaced or not layout.sleeps else PINNED * choice.awake["weights"]
        return {"weights": sleeping, "data": data}
    if not (layout.sleeps or layout.offload == "weights"):
        return {"data": data}
    stays = replace(layout, offload="none")
    return {"weights": score_terms(model, stays, 0, weight_bytes=demand.weight_bytes)["weights"], "data": data}


def sync_memory(
    source: Demand, given: RoleChoice, target: Demand, followed: RoleChoice, sharp: Sharp, *, same_gpus: bool
) -> Terms:
    """Return the terms of the trained role ``source`` while its weights go to ``target``."""
    model, layout, training = source.architecture, given.layout, source.training
    if model is None or not given.awake:
        return {}
    # vLLM takes weights over by CUDA IPC, in the type in which they are trained.
    packed = same_gpus and "tensor" in target.parallel and training.lora is None
    terms = sync_terms(
        model,
        layout,
        training,
        followed.layout if same_gpus else None,
        weight_bytes=target.weight_bytes,
        packed_bytes=max(training.weights, source.weight_bytes) if packed else None,
        sharp=sharp,
    )
    # A sleeping role wakes with its weights alone.
    stays = {} if layout.sleeps else {term: given.idle.get(term, 0.0) for term in ("gradients", "optimizer")}
    return terms | stays
