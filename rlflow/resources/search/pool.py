"""Roles that use the same GPUs: what they have in common, what each chooses, and what it keeps while others work."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout, Offload
from rlflow.resources.memory.phases import asleep_terms, host_terms, score_terms, sync_terms
from rlflow.resources.memory.state import Terms, state_terms
from rlflow.resources.search.site import Site
from rlflow.resources.workload import Workload

# Of an engine on the processor, where memory is not counted.
CPU_MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Policy:
    """What the roles of a pool have in common: what stays on its GPUs while others work."""

    sleeps: bool = False
    """Trained and scoring roles put their state into the host's memory."""
    zero_stage: int = 3
    """Of trained roles."""
    offload: Offload = "none"
    """Of trained roles; ``weights`` of scoring ones too."""
    shards_scorers: bool = True
    """Models that only score are sharded too, instead of being whole on every GPU."""


@dataclass(frozen=True)
class Pool:
    """Roles that use the same GPUs, one after another."""

    demands: tuple[Demand, ...]
    gpus: int
    groups: Callable[[int], int]
    """So many groups of a size, each inside a host, the pool's GPUs make."""
    site: Site
    largest_group: int

    @property
    def shared(self) -> bool:
        return len(self.demands) > 1

    @property
    def counts_memory(self) -> bool:
        return self.site.memory_gib is not None


@dataclass(frozen=True)
class Choice:
    """One role's use of its pool."""

    layout: Layout
    phase: str
    """In which it needs most: generate, score or update."""
    awake: Terms
    """GiB of each of its GPUs in that phase."""
    resting: Terms
    """While others on its GPUs work."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each of its nodes."""
    kv_tokens: float | None = None
    """That one engine has room for."""
    concurrency: float | None = None
    """Sequences that one engine writes at once."""


@dataclass(frozen=True)
class Shortage:
    """Nothing fits: what came nearest lacks so much."""

    role: str
    gib: float
    what: str

    def __str__(self) -> str:
        return f"{self.role}: {self.what}"


def static_layout(demand: Demand, policy: Policy, pool: Pool) -> Layout:
    """A trained or scoring role's, without what depends on the memory that is left."""
    wants = demand.wants
    spread = "data" in demand.parallel
    stage = policy.zero_stage if demand.trains else (3 if policy.shards_scorers else 0)
    size = (demand.pinned("tensor_parallel_size") or 1) * (demand.pinned("pipeline_parallel_size") or 1)
    sequence = demand.pinned("sequence_parallel_size") or 1
    copies = demand.pinned("data_parallel_size") or max(1, pool.groups(size * sequence))
    # Nothing but weights can be offloaded of a model that only scores.
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


def resting_terms(demand: Demand, policy: Policy, pool: Pool) -> Terms:
    """What the role keeps on its GPUs while others work."""
    if not pool.shared or demand.architecture is None or not pool.counts_memory:
        return {}
    if demand.generates and not demand.trains:
        if "tensor" in demand.parallel:
            return asleep_terms(True, demand.architecture, eager=demand.wants.eager is True)
        # An engine that cannot sleep.
        return asleep_terms(False) | {"weights": demand.architecture.num_parameters * demand.weight_bytes / GIB}
    layout = static_layout(demand, policy, pool)
    if layout.sleeps:
        return asleep_terms(False)
    if demand.trains:
        return asleep_terms(False) | dict(state_terms(demand.architecture, layout, demand.training))
    weights = score_terms(demand.architecture, layout, 0, weight_bytes=demand.weight_bytes)["weights"]
    return asleep_terms(False) | {"weights": weights}


def host_memory(demand: Demand, choice: Choice, workload: Workload) -> Terms:
    """Of host memory for each of the role's GPUs: what is offloaded, what sleeps there, and its part of the data: what
    it makes, once with itself and once in the object store, and what it reads."""
    model, layout = demand.architecture, choice.layout
    if model is None or not choice.awake:
        return {}
    data = (2 * workload.bytes_made_by(demand.role) + workload.bytes_read_by(demand.role)) / layout.num_gpus / GIB
    if demand.trains:
        return host_terms(model, layout, demand.training, parks=layout.sleeps, data_gib=data)
    if demand.generates or not (layout.sleeps or layout.offload == "weights"):
        return {"data": data}
    stays = replace(layout, offload="none")
    return {"weights": score_terms(model, stays, 0, weight_bytes=demand.weight_bytes)["weights"], "data": data}


def sync_memory(source: Demand, given: Choice, target: Demand, followed: Choice, *, same_gpus: bool) -> Terms:
    """Of the trained role ``source`` while its weights go to ``target``."""
    model, layout = source.architecture, given.layout
    if model is None or not given.awake:
        return {}
    engine = followed.layout if same_gpus else None
    terms = sync_terms(model, layout, source.training, engine, weight_bytes=target.weight_bytes)
    # What sleeps gets up with its weights alone.
    stays = {} if layout.sleeps else {term: given.resting.get(term, 0.0) for term in ("gradients", "optimizer")}
    return terms | stays
