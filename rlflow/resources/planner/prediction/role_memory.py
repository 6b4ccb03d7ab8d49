"""The memory of a role in its pool: while it works, while others work, and while its weights are sent."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import floor

from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.overheads import Sharp, asleep_terms, process_terms, sync_terms
from rlflow.resources.memory.phases import host_terms, score_terms, update_terms
from rlflow.resources.memory.state import Terms, TrainingMemory, persistent_buffers, state_terms, total_gib
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import MEMORY_BANDS, Band, Kind, Margin, kind_of
from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.pools import Pool, PoolShape, RoleChoice, Shortage
from rlflow.resources.workload import WeightSync, Workload

# torch rounds every piece of memory that GPUs read directly up to a power of two (ATen/core/CachingHostAllocator.h), so
# that vLLM's copies of weights take up to twice their size. Other offloaded state is in pieces of such a size.
_PINNED = 2
# A search needs the same layouts again and again, for other roles and in other pools.
_update_terms = lru_cache(maxsize=2**14)(update_terms)


def memory_band(demand: Demand, layout: Layout) -> Band:
    """Return the error band of a GPU's memory while a role works.

    An engine takes exactly what it is given. Its band is that of the idle roles on as many GPUs.
    """
    if demand.job == "serve":
        return MEMORY_BANDS[Kind.SHARDED if layout.num_gpus > 1 else Kind.ALONE]
    return MEMORY_BANDS[kind_of(layout, demand.training)]


def available_gib(demand: Demand, pool: Pool, idle_gib: float, error: float) -> float:
    """Return the memory that a role may take on each GPU if predictions are wrong by the factor ``error``.

    ``idle_gib`` is what idle roles hold there. Beside an engine, only theirs can be wrong.
    """
    usable = pool.host_set.usable_gib
    return usable - error * idle_gib if demand.job == "serve" else usable / error - idle_gib


def working_terms(demand: Demand, layout: Layout, tokens: float, sharp: Sharp) -> Terms:
    """Return what a role that trains or scores holds at its peak with so many tokens in a micro-batch."""
    model = demand.architecture
    assert model is not None
    if demand.job == "train":
        return _update_terms(model, layout, demand.training, tokens, sharp=sharp)
    return score_terms(model, layout, tokens, weight_bytes=demand.weight_bytes, training=demand.training, sharp=sharp)


def idle_terms(demand: Demand, layout: Layout, shape: PoolShape, host_set: HostSet) -> Terms:
    """Return what a role holds on shared GPUs while others work, after torch has released its cache."""
    model, sharp = demand.architecture, host_set.sharp
    if model is None or not host_set.counts_memory:
        return {}
    if demand.job == "serve" and "tensor" in demand.parallel:
        width = demand.pinned("tensor_parallel_size") or shape.largest_group
        return asleep_terms(model, width, sharp, eager=demand.pins.eager is True)
    process = process_terms(layout, sharp)
    if layout.sleeps:
        return process
    if demand.job == "train":
        return process | _idle_state(model, layout, demand.training)
    if demand.job == "serve":
        # This engine cannot sleep.
        return process | {"weights": model.num_parameters * demand.weight_bytes / GIB}
    return process | {"weights": score_terms(model, layout, 0, weight_bytes=demand.weight_bytes)["weights"]}


def _idle_state(model: Architecture, layout: Layout, training: TrainingMemory) -> dict[str, float]:
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
    if demand.job == "train":
        return host_terms(model, layout, demand.training, offloads=layout.sleeps, data_gib=data)
    if demand.job == "serve":
        # vLLM's sleep keeps the weights in the host's memory unless a weight sync replaces all of them.
        replaced = demand.follows_lora is None and demand.role in {sync.target for sync in workload.weight_syncs}
        sleeping = 0.0 if replaced or not layout.sleeps else _PINNED * choice.awake["weights"]
        return {"weights": sleeping, "data": data}
    if not (layout.sleeps or layout.offload == "weights"):
        return {"data": data}
    on_gpu = replace(layout, offload="none")
    return {"weights": score_terms(model, on_gpu, 0, weight_bytes=demand.weight_bytes)["weights"], "data": data}


def sync_memory(
    sync: WeightSync,
    demands: Mapping[str, Demand],
    choices: Mapping[str, RoleChoice],
    sharp: Sharp,
    *,
    same_gpus: bool,
) -> Terms:
    """Return the terms of the trained role while its weights go to the role that follows it."""
    source, target, choice = demands[sync.source], demands[sync.target], choices[sync.source]
    model, layout, training = source.architecture, choice.layout, source.training
    if model is None or not choice.awake:
        return {}
    # vLLM takes weights over by CUDA IPC, in the type in which they are trained.
    packed = same_gpus and "tensor" in target.parallel and target.follows_lora is None
    terms = sync_terms(
        model,
        layout,
        training,
        choices[sync.target].layout if same_gpus else None,
        weight_bytes=target.weight_bytes,
        packed_bytes=max(training.weights, source.weight_bytes) if packed else None,
        sharp=sharp,
    )
    if same_gpus and (layout.stays or choices[sync.target].layout.receives_awake):
        # The engine holds all that it ever does, and so does a role that stays.
        terms = {term: gib for term, gib in terms.items() if not term.startswith(("engine", "graphs"))} | {
            "engine": total_gib(choices[sync.target].awake),
            "engine buffer": terms.get("engine buffer", 0.0),
        }
    # A sleeping role wakes with its weights alone.
    held = choice.idle if layout.stays else {name: choice.idle.get(name, 0.0) for name in ("gradients", "optimizer")}
    return terms if layout.sleeps else {**terms, **held}


def sync_needs(
    demands: Mapping[str, Demand], choices: Mapping[str, RoleChoice], workload: Workload, sharp: Sharp
) -> Iterator[tuple[WeightSync, float]]:
    """Yield each weight sync between roles of a pool with the memory that it needs, idle roles included."""
    for sync in workload.weight_syncs:
        if sync.source in choices and sync.target in choices:
            needed = sum(sync_memory(sync, demands, choices, sharp, same_gpus=True).values())
            idle = (choice for role, choice in choices.items() if role not in (sync.source, sync.target))
            yield sync, needed + sum(sum(choice.idle.values()) for choice in idle)


def sync_margin(pool: Pool, choices: Mapping[str, RoleChoice], workload: Workload) -> Margin | Shortage:
    """Return the margin of the weight sync that needs most."""
    usable = pool.host_set.usable_gib
    demands = {demand.role: demand for demand in pool.demands}
    worst = Margin.SAFE
    for sync, needed in sync_needs(demands, choices, workload, pool.host_set.sharp):
        band = memory_band(demands[sync.source], choices[sync.source].layout)
        margin = next((margin for margin in Margin if needed * band.factor(margin) <= usable), None)
        if margin is None:
            what = f"{needed:.0f} GiB while its weights go to {sync.target}, of {usable:.0f} GiB"
            return Shortage(sync.source, needed - usable, what)
        worst = max(worst, margin)
    return worst


def largest_micro_batch(gib: Callable[[int], float], fits: int, wanted: int, available: float) -> int:
    """Return how many of the ``wanted`` tokens fit, given that ``fits`` tokens do.

    These are all, or nearly the maximum in multiples of 1024. Memory is a maximum of linear functions of the tokens, so
    it lies below a line between two of its points, except where logits come in chunks, beyond the first chunk.
    """
    if gib(wanted) <= available:
        return wanted
    low = fits
    for _ in range(2):
        low += floor((wanted - low) * (available - gib(low)) / (gib(wanted) - gib(low)))
    while low > fits and gib(low) > available:
        low = (low + fits) // 2
    return max(fits, low // 1024 * 1024)
