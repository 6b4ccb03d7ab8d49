"""The layouts of one role in its pool: degrees, ZeRO stages and micro-batches. Memory is checked before time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, floor

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import EngineMemory, generate_memory, score_terms, update_terms
from rlflow.resources.memory.state import Terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.pool import (
    CPU_MICRO_BATCH_TOKENS,
    HostSet,
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    base_layout,
    idle_terms,
)
from rlflow.resources.planner.task_times import MAX_NUM_SEQS, task_seconds
from rlflow.resources.workload import Task

MAX_MICRO_BATCH_TOKENS = 65536
_MAX_UTILIZATION = 0.9
# A search needs the same layouts again and again, beside other roles and with other sizes of their pools.
_update_terms = lru_cache(maxsize=2**14)(update_terms)


def best_layout(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float
) -> RoleChoice | Shortage:
    """Return the fastest choice with ``available`` GiB on each GPU, or the shortage of the nearest one."""
    generates = demand.generates and not demand.trains
    options = list((_engines if generates else _models)(demand, tasks, policy, pool, available))
    fitting = [option for option in options if isinstance(option, RoleChoice)]
    if fitting:
        # Among equally fast choices, the first has the least tensor and sequence parallelism.
        return min(fitting, key=_cautious_seconds)
    shortages = [option for option in options if isinstance(option, Shortage)]
    no_way = Shortage(demand.role, float("inf"), f"its degrees do not fit {pool.gpus} GPUs")
    return min(shortages, key=lambda shortage: shortage.gib, default=no_way)


def _cautious_seconds(choice: RoleChoice) -> float:
    """Return the seconds of a choice, plus the error of predicted times where an update keeps all activations.

    Gradient checkpointing saves memory for certain, and costs time only as far as the prediction is right.
    """
    keeps = choice.phase == "update" and not choice.layout.gradient_checkpointing
    return sum(choice.seconds.values()) * (1 + TIME_ERROR * keeps)


def _sequence_layouts(demand: Demand, policy: PoolPolicy, pool: Pool) -> Iterator[Layout | Shortage]:
    """Yield layouts with each sequence parallelism that divides the heads and fits a host (Jacobs et al. 2023)."""
    static = base_layout(demand, policy, pool)
    pinned = demand.pinned("sequence_parallel_size")
    sizes = [pinned] if pinned else _group_sizes(demand, min(pool.largest_group, pool.gpus))
    for size in sizes if demand.architecture else sizes[:1]:
        stages = _stages(demand, static.tensor_parallel_size * size) or static.pipeline_parallel_size
        layout = replace(static, sequence_parallel_size=size, pipeline_parallel_size=stages)
        yield with_data_parallel_size(demand, pool, layout, pool.groups(layout.group_size) // stages)


def _group_sizes(demand: Demand, most: int) -> list[int]:
    """Return the sizes of groups that can share the heads: powers of two, and divisors of a pinned number of GPUs."""
    gpus = demand.pinned("gpus")
    sizes = {2**n for n in range(most.bit_length())} | {n for n in range(1, most + 1) if gpus and gpus % n == 0}
    return [size for size in sorted(sizes) if size <= most and demand.shares_heads(size)]


def _stages(demand: Demand, group: int) -> int | None:
    """Return the pipeline stages that follow from pinned GPUs and copies for groups of a size; None: any."""
    gpus, copies = demand.pinned("gpus"), demand.pinned("data_parallel_size")
    is_open = demand.pinned("pipeline_parallel_size") is None
    if gpus is None or copies is None or not is_open or gpus % (copies * group):
        return None
    stages = gpus // (copies * group)
    return stages if demand.architecture is None or stages <= demand.architecture.num_hidden_layers else None


def with_data_parallel_size(demand: Demand, pool: Pool, layout: Layout, groups: int) -> Layout | Shortage:
    """Return the layout with as many copies as pinned, or as ``groups`` allow.

    A pinned number of GPUs is used in full.
    """
    copies = demand.pinned("data_parallel_size") or groups
    layout = replace(layout, data_parallel_size=max(1, copies))
    if copies < 1 or copies > groups:
        inside = layout.tensor_parallel_size * layout.sequence_parallel_size
        group = f"groups of {inside} GPUs inside hosts" if inside > 1 else "GPUs"
        count = max(1, copies) * layout.pipeline_parallel_size
        what = f"{count} {group}, where its pool has {groups * layout.pipeline_parallel_size}"
        return Shortage(demand.role, float("inf"), what)
    pinned = demand.pinned("gpus")
    if pinned is not None and "data" in demand.parallel and layout.num_gpus != pinned:
        return Shortage(demand.role, float("inf"), f"only {layout.num_gpus} of its {pinned} pinned GPUs would be used")
    return layout


def _models(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float
) -> Iterator[RoleChoice | Shortage]:
    """Yield the choices of a role that trains or scores: sequence parallelism, checkpointing, and the micro-batch."""
    idle = idle_terms(demand, policy, pool)
    longest = _longest_expected(tasks)
    for layout in _sequence_layouts(demand, policy, pool):
        if isinstance(layout, Shortage):
            yield layout
            continue
        if layout.offload == "weights" and layout.zero_stage != 3:
            yield Shortage(demand.role, float("inf"), "weights can be offloaded in ZeRO stage 3 only")
            continue
        pinned = demand.pins.gradient_checkpointing
        both = demand.trains and pinned == "auto" and pool.counts_memory
        for saves in (False, True) if both else (pinned is True and demand.trains,):
            tried = replace(layout, gradient_checkpointing=saves)
            terms = _terms_of(demand, tried, pool)
            sized = _micro_batch(demand, tasks, tried, terms, available)
            if isinstance(sized, Shortage):
                yield sized
                continue
            awake = terms(max(longest, sized.micro_batch_tokens))
            state = sum(awake.get(term, 0.0) for term in ("weights", "gradients", "optimizer"))
            seconds = task_seconds(demand, tasks, sized, pool.host_set.speed, kv_tokens=float("inf"), moved_gib=state)
            yield RoleChoice(sized, "update" if demand.trains else "score", awake, idle, seconds)


def _terms_of(demand: Demand, layout: Layout, pool: Pool) -> Callable[[float], Terms]:
    """Return a function from the tokens of a micro-batch to the memory terms at its peak."""
    model = demand.architecture
    if model is None or not pool.counts_memory:
        return lambda tokens: {}
    if demand.trains:
        return lambda tokens: _update_terms(model, layout, demand.training, tokens, sharp=pool.host_set.sharp)
    return lambda tokens: score_terms(
        model, layout, tokens, weight_bytes=demand.weight_bytes, training=demand.training, sharp=pool.host_set.sharp
    )


def _micro_batch(
    demand: Demand, tasks: Sequence[Task], layout: Layout, terms: Callable[[float], Terms], available: float
) -> Layout | Shortage:
    """Return the layout with the largest micro-batch that fits, and that the role can use.

    At least the longest sequence.

    Where memory is not modelled, sequences that are not expected are ignored: each would be a micro-batch of its own.
    """
    pinned, expected = demand.pins.micro_batch_tokens, _longest_expected(tasks)
    if available == float("inf"):
        return replace(layout, micro_batch_tokens=max(expected, CPU_MICRO_BATCH_TOKENS) if pinned == "auto" else pinned)
    longest = max((task.longest for task in tasks), default=1)
    needed = longest if pinned == "auto" else max(expected, pinned)
    least = sum(terms(needed).values())
    if least > available:
        empty = sum(terms(0).values())
        what = (
            f"{empty:.0f} GiB before the first token" if empty > available else f"{least:.0f} GiB for {needed} tokens"
        )
        return Shortage(demand.role, least - available, f"{what}, of {available:.0f} GiB")
    if pinned != "auto":
        return replace(layout, micro_batch_tokens=pinned)
    ranks = max(1, layout.data_parallel_size)
    useful = max((ceil(task.tokens * task.epochs / task.minibatches / ranks) for task in tasks), default=longest)
    most = min(MAX_MICRO_BATCH_TOKENS, max(longest, useful))
    return replace(layout, micro_batch_tokens=largest_micro_batch(terms, longest, most, available))


def _longest_expected(tasks: Sequence[Task]) -> int:
    return max((task.longest for task in tasks if task.is_expected), default=1)


def largest_micro_batch(terms: Callable[[float], Terms], fits: int, most: int, available: float) -> int:
    """Return how many tokens fit, given that ``fits`` tokens do: ``most``, or nearly the maximum in multiples of 1024.

    Memory is a maximum of linear functions of the tokens, so it lies below a line between two of its points, except
    where logits come in chunks, beyond the first chunk.
    """
    low, needed_low = fits, sum(terms(fits).values())
    high, needed_high = most, sum(terms(most).values())
    if needed_high <= available:
        return most
    for _ in range(2):
        low += floor((high - low) * (available - needed_low) / (needed_high - needed_low))
        needed_low = sum(terms(low).values())
    while low > fits and sum(terms(low).values()) > available:
        low = (low + fits) // 2
    return max(fits, low // 1024 * 1024)


def _engines(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float
) -> Iterator[RoleChoice | Shortage]:
    """Yield the choices of a role that generates: tensor parallelism, and pipeline stages if a host is too small."""
    pinned_stages = demand.pinned("pipeline_parallel_size")
    sequence = demand.pinned("sequence_parallel_size") or 1
    sizes = _tensor_sizes(demand, pool)
    fits = False
    for size in sizes:
        one = _engine(
            demand, tasks, policy, pool, available, size, pinned_stages or _stages(demand, size * sequence) or 1
        )
        fits = fits or isinstance(one, RoleChoice)
        yield one
    if not fits and pinned_stages is None:
        yield from (_engine(demand, tasks, policy, pool, available, sizes[-1], stages) for stages in (2, 4, 8))


def _tensor_sizes(demand: Demand, pool: Pool) -> list[int]:
    """Return the pinned size, or those that divide the heads and fit a host."""
    if (pinned := demand.pinned("tensor_parallel_size")) is not None:
        return [pinned]
    return _group_sizes(demand, pool.largest_group) if demand.architecture else [1]


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
    concurrency = min(each, MAX_NUM_SEQS, memory.kv_tokens / typical)
    terms = memory.terms
    if not serves:
        # Its KV cache grows with what it generates.
        layout = replace(layout, gpu_memory_utilization=None)
        longest = max((task.longest for task in tasks), default=1)
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
    if memory.kv_tokens < longest:
        rest = sum(gib for term, gib in memory.terms.items() if term != "kv")
        lacks = f"{rest:.0f} GiB on each GPU before the KV cache"
        lacks = f"no KV cache room for {longest} tokens" if rest < share * memory_gib else lacks
        what = f"{groups}, {lacks}, of {share * memory_gib:.0f} GiB available"
        return Shortage(demand.role, rest - share * memory_gib, what)
    return layout, memory
