"""The layouts of one role in its pool: degrees, ZeRO stages and micro-batches. Memory is checked before time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, floor, inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import score_terms, update_terms
from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.degrees import group_sizes, pipeline_stages, with_data_parallel_size
from rlflow.resources.planner.engine_layouts import engine_choices
from rlflow.resources.planner.pool import (
    CPU_MICRO_BATCH_TOKENS,
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    base_layout,
    idle_terms,
)
from rlflow.resources.planner.task_times import task_seconds
from rlflow.resources.workload import Task

MAX_MICRO_BATCH_TOKENS = 65536
# A search needs the same layouts again and again, beside other roles and with other sizes of their pools.
_update_terms = lru_cache(maxsize=2**14)(update_terms)


def best_layout(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool, available: float
) -> RoleChoice | Shortage:
    """Return the fastest choice with ``available`` GiB on each GPU, or the shortage of the nearest one."""
    generates = demand.generates and not demand.trains
    options = list((engine_choices if generates else _models)(demand, tasks, policy, pool, available))
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


def least_seconds(demand: Demand, tasks: Sequence[Task], pool: Pool) -> Mapping[str, float]:
    """Return the least time of each of the role's nodes if it had the GPUs of its pool, and their memory, to itself.

    No policy and no company makes a node faster.
    """
    policies = {PoolPolicy(zero_stage=stage, shards_scorers=shards) for stage in (2, 3) for shards in (False, True)}
    found: list[Mapping[str, float]] = []
    if demand.generates and not demand.trains:
        policy, available = PoolPolicy(), pool.host_set.usable_gib
        choices = engine_choices(demand, tasks, policy, replace(pool, demands=(demand,)), available)
        found = [choice.seconds for choice in choices if isinstance(choice, RoleChoice)]
    else:
        layouts = (layout for policy in policies for layout in _sequence_layouts(demand, policy, pool))
        for layout in {layout for layout in layouts if isinstance(layout, Layout)}:
            largest = replace(layout, micro_batch_tokens=2**40, gradient_checkpointing=False, sleeps=False)
            speed = pool.host_set.speed
            found.append(task_seconds(demand, tasks, largest, speed, kv_tokens=inf))
    return {task.node: min((seconds[task.node] for seconds in found), default=inf) for task in tasks}


def _sequence_layouts(demand: Demand, policy: PoolPolicy, pool: Pool) -> Iterator[Layout | Shortage]:
    """Yield layouts with each sequence parallelism that divides the heads and fits a host (Jacobs et al. 2023)."""
    static = base_layout(demand, policy, pool)
    pinned = demand.pinned("sequence_parallel_size")
    sizes = [pinned] if pinned else group_sizes(demand, min(pool.largest_group, pool.gpus))
    for size in sizes if demand.architecture else sizes[:1]:
        stages = pipeline_stages(demand, static.tensor_parallel_size * size) or static.pipeline_parallel_size
        layout = replace(static, sequence_parallel_size=size, pipeline_parallel_size=stages)
        yield with_data_parallel_size(demand, pool, layout, pool.groups(layout.group_size) // stages)


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
