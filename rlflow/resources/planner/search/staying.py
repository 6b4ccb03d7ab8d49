"""Pools whose roles need not give up memory: all of it where everything fits side by side, or a part."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlflow.resources.demand import Demand
from rlflow.resources.memory.phases import cached_gib
from rlflow.resources.memory.state import total_gib
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Pool, PoolUse, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import available_gib, memory_band, sync_memory
from rlflow.resources.planner.prediction.task_times import task_seconds
from rlflow.resources.planner.search.model_layouts import MAX_MICRO_BATCH_TOKENS, ModelOption
from rlflow.resources.workload import Workload

# The most tokens in the micro-batches of roles that stay, the fewest first. With 16,384, matrix products are within 1 %
# of their best speed.
_MICRO_BATCHES = (8192, 16384, 32768, MAX_MICRO_BATCH_TOKENS)

SyncMargin = Callable[[Pool, Mapping[str, RoleChoice], Workload], Margin | Shortage]


def with_fewer_turns(pool: Pool, use: PoolUse, workload: Workload, sync_margin: SyncMargin) -> PoolUse:
    """Return the use of a pool in which its roles give up as little memory as possible, where that is faster.

    Every role then holds more, within the usual margin of error.
    """
    layouts = [use.choices[demand.role].layout for demand in pool.demands if demand.job != "serve"]
    is_short = any(layout.sleeps or layout.offload in ("optimizer", "weights") for layout in layouts)
    if not pool.is_shared or not pool.counts_memory or use.margin is not Margin.SAFE or is_short:
        return use
    staying = _side_by_side(pool, use, workload, sync_margin)
    if staying is not None and staying.total < use.total:
        return staying
    return _receiving_awake(pool, use, workload, sync_margin)


def _side_by_side(pool: Pool, use: PoolUse, workload: Workload, sync_margin: SyncMargin) -> PoolUse | None:
    """Return the fastest use in which all roles stay, with the degrees of ``use``; None where they do not fit.

    They fit if all that each of them ever holds does, together.
    """
    # The engine has all of its memory from the start, and other roles hold at least what they do while they are idle.
    least = sum(
        total_gib(choice.awake if choice.phase == "generate" else choice.idle) for choice in use.choices.values()
    )
    if least > pool.host_set.usable_gib:
        return None
    best: PoolUse | None = None
    for tokens in _MICRO_BATCHES:
        choices = {
            demand.role: _staying(demand, use.choices[demand.role], pool, workload, tokens) for demand in pool.demands
        }
        if not _fits(pool, choices) or sync_margin(pool, choices, workload) is not Margin.SAFE:
            break
        staying = PoolUse(choices, Margin.SAFE)
        if best is None or staying.total < best.total:
            best = staying
    return best


def _receiving_awake(pool: Pool, use: PoolUse, workload: Workload, sync_margin: SyncMargin) -> PoolUse:
    """Return the use in which engines are awake while they receive weights, or ``use`` where that does not fit.

    The role that sends the weights then keeps the memory that they go through.
    """
    demands, choices = {demand.role: demand for demand in pool.demands}, dict(use.choices)
    for sync in workload.copies:
        if sync.source in choices and sync.target in choices and choices[sync.target].layout.sleeps:
            buffers = sync_memory(sync, demands, choices, pool.host_set.sharp, same_gpus=True)
            source, target = choices[sync.source], choices[sync.target]
            kept = {term: buffers.get(term, 0.0) for term in ("gathered", "buffer")}
            choices[sync.source] = replace(source, idle={**source.idle, **kept})
            choices[sync.target] = replace(target, layout=replace(target.layout, receives_awake=True))
    fits = _fits(pool, choices) and sync_margin(pool, choices, workload) is Margin.SAFE
    return replace(use, choices=choices) if fits else use


def _staying(demand: Demand, choice: RoleChoice, pool: Pool, workload: Workload, tokens: int) -> RoleChoice:
    """Return a role's choice with at most so many tokens in a micro-batch, which holds its memory all the time."""
    tasks, model = workload.of(demand.role), demand.architecture
    layout = replace(choice.layout, sleeps=False, stays=True)
    if demand.job == "serve" or model is None:
        seconds = task_seconds(demand, tasks, layout, pool.host_set.speed, kv_tokens=choice.kv_tokens)
        return replace(choice, layout=layout, idle=choice.awake, seconds=seconds)
    most = min(tokens, choice.layout.micro_batch_tokens)
    staying = ModelOption(demand, tasks, pool, layout, {}, None).with_tokens(most)
    cached = 0.0
    if demand.job == "train":
        cached = cached_gib(
            model, staying.layout, demand.training, staying.layout.micro_batch_tokens, sharp=pool.host_set.sharp
        )
    held = {**staying.awake, "cached": cached}
    return replace(staying, awake=held, idle=held)


def _fits(pool: Pool, choices: Mapping[str, RoleChoice]) -> bool:
    """Return whether each role has room for its work beside what the others hold."""
    idle = {role: total_gib(choice.idle) for role, choice in choices.items()}
    for demand in pool.demands:
        choice = choices[demand.role]
        beside = sum(gib for role, gib in idle.items() if role != demand.role)
        error = memory_band(demand, choice.layout).factor(Margin.SAFE)
        if total_gib(choice.awake) > available_gib(demand, pool, beside, error) + 1e-9:
            return False
    return True
