"""The layouts of a role that generates: tensor parallelism, pipeline stages, and the memory of its engines."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import floor

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import EngineMemory, generate_memory
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.degrees import group_sizes, pipeline_stages, with_data_parallel_size
from rlflow.resources.planner.pool import (
    CPU_MICRO_BATCH_TOKENS,
    HostSet,
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    idle_terms,
)
from rlflow.resources.planner.task_times import MAX_NUM_SEQS, task_seconds
from rlflow.resources.workload import Task

_MAX_UTILIZATION = 0.9


def engine_choices(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float
) -> Iterator[RoleChoice | Shortage]:
    """Yield the choices of a role that generates: tensor parallelism, and pipeline stages if a host is too small."""
    pinned_stages = demand.pinned("pipeline_parallel_size")
    sequence = demand.pinned("sequence_parallel_size") or 1
    sizes = _tensor_sizes(demand, pool)
    fits = False
    for size in sizes:
        one = _engine(
            demand, tasks, policy, pool, available, size, pinned_stages or pipeline_stages(demand, size * sequence) or 1
        )
        fits = fits or isinstance(one, RoleChoice)
        yield one
    if not fits and pinned_stages is None:
        yield from (_engine(demand, tasks, policy, pool, available, sizes[-1], stages) for stages in (2, 4, 8))


def _tensor_sizes(demand: Demand, pool: Pool) -> list[int]:
    """Return the pinned size, or those that divide the heads and fit a host."""
    if (pinned := demand.pinned("tensor_parallel_size")) is not None:
        return [pinned]
    return group_sizes(demand, pool.largest_group) if demand.architecture else [1]


def _engine(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float, tensor: int, stages: int
) -> RoleChoice | Shortage:
    tokens = demand.pins.micro_batch_tokens
    serves = "tensor" in demand.parallel
    sequence = demand.pinned("sequence_parallel_size") or 1
    eager = not pool.counts_memory if demand.pins.eager == "auto" else demand.pins.eager
    layout = with_data_parallel_size(
        demand,
        pool,
        Layout(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            sequence_parallel_size=sequence,
            micro_batch_tokens=CPU_MICRO_BATCH_TOKENS if tokens == "auto" else tokens,
            eager=eager if serves else None,
            sleeps=pool.shared and serves and pool.counts_memory,
        ),
        pool.groups(tensor * sequence) // stages,
    )
    if isinstance(layout, Shortage):
        return layout
    idle = idle_terms(demand, policy, pool)
    if demand.architecture is None or pool.host_set.memory_gib is None:
        seconds = task_seconds(demand, tasks, layout, pool.host_set.speed, kv_tokens=float("inf"))
        return RoleChoice(layout, "generate", {}, idle, seconds)
    served = _served(demand, tasks, layout, pool.host_set, demand.architecture, available)
    if isinstance(served, Shortage):
        return served
    layout, memory = served
    seconds = task_seconds(demand, tasks, layout, pool.host_set.speed, kv_tokens=memory.kv_tokens)
    typical = max((task.typical_length for task in tasks), default=1.0)
    each = max((task.samples / layout.data_parallel_size for task in tasks), default=1.0)
    states = demand.architecture.state_tokens(layout.tensor_parallel_size)
    concurrency = min(each, MAX_NUM_SEQS, memory.kv_tokens / (typical + states))
    terms = memory.terms
    if not serves:
        # Its KV cache grows with what it generates.
        layout = replace(layout, gpu_memory_utilization=None)
        longest = max((task.longest for task in tasks), default=1) + states
        terms = terms | {"kv": terms["kv"] * min(1.0, min(each, MAX_NUM_SEQS) * longest / memory.kv_tokens)}
    return RoleChoice(layout, "generate", terms, idle, seconds, memory.kv_tokens, concurrency)


def _served(
    demand: Demand, tasks: Sequence[Task], layout: Layout, host_set: HostSet, model: Architecture, available: float
) -> tuple[Layout, EngineMemory] | Shortage:
    """Return the layout with ``gpu_memory_utilization`` as pinned, or with all that is left in steps of 0.05."""
    memory_gib = host_set.memory_gib
    assert memory_gib is not None
    wanted = demand.pins.gpu_memory_utilization
    left = min(_MAX_UTILIZATION, floor(available / memory_gib * 20 + 1e-9) / 20)
    share = left if wanted == "auto" else wanted
    groups = f"tp {layout.tensor_parallel_size}"
    if share <= 0:
        return Shortage(demand.role, -available, "the other roles on its GPUs leave no memory")
    if share * memory_gib > available + 1e-9:
        rest = max(0, floor(available / memory_gib * 100)) / 100
        what = f"gpu_memory_utilization {share:g}, which is more than the {rest:g} that is left"
        return Shortage(demand.role, share * memory_gib - available, what)
    layout = replace(layout, gpu_memory_utilization=share)
    memory = generate_memory(
        model,
        layout,
        memory_gib,
        max_num_seqs=MAX_NUM_SEQS,
        weight_bytes=demand.weight_bytes,
        lora=demand.follows_lora,
        sharp=host_set.sharp,
    )
    longest = max((task.longest for task in tasks), default=1)
    if memory.kv_tokens < longest + model.state_tokens(layout.tensor_parallel_size):
        rest = sum(gib for term, gib in memory.terms.items() if term != "kv")
        lacks = f"{rest:.0f} GiB on each GPU before the KV cache"
        lacks = f"no KV cache room for {longest} tokens" if rest < share * memory_gib else lacks
        what = f"{groups}, {lacks}, of {share * memory_gib:.0f} GiB available"
        return Shortage(demand.role, rest - share * memory_gib, what)
    return layout, memory
