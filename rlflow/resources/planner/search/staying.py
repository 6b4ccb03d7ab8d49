"""Pools whose roles need not give up memory: all of it where everything fits side by side, or a part."""

from collections.abc import Mapping
from dataclasses import replace

from rlflow.resources.memory.state import total_gib
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Pool, PoolUse, RoleChoice
from rlflow.resources.planner.prediction.role_memory import (
    available_gib,
    memory_band,
    sync_margin,
    sync_memory,
)
from rlflow.resources.planner.search.layout_search import LayoutSearch
from rlflow.resources.planner.search.model_layouts import MAX_MICRO_BATCH_TOKENS
from rlflow.resources.workload import Workload

# The most tokens in the micro-batches of roles that stay, the fewest first. With 16,384, matrix products are within 1 %
# of their best speed.
_MICRO_BATCHES = (8192, 16384, 32768, MAX_MICRO_BATCH_TOKENS)


def with_fewer_turns(pool: Pool, use: PoolUse, workload: Workload, searches: Mapping[str, LayoutSearch]) -> PoolUse:
    """Return the use of a pool in which its roles give up as little memory as possible, where that is faster.

    Every role then holds more, within the usual margin of error.
    """
    layouts = [use.choices[demand.role].layout for demand in pool.demands if demand.job != "serve"]
    is_short = any(layout.sleeps or layout.offload in ("optimizer", "weights") for layout in layouts)
    if not pool.is_shared or not pool.counts_memory or use.margin is not Margin.SAFE or is_short:
        return use
    staying = _side_by_side(pool, use, workload, searches)
    if staying is not None and staying.total < use.total:
        return staying
    return _receiving_awake(pool, use, workload)


def _side_by_side(pool: Pool, use: PoolUse, workload: Workload, searches: Mapping[str, LayoutSearch]) -> PoolUse | None:
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
    largest = max(choice.layout.micro_batch_tokens for choice in use.choices.values())
    for tokens in sorted({min(tokens, largest) for tokens in _MICRO_BATCHES}):
        choices = {role: search.staying(use.choices[role], tokens) for role, search in searches.items()}
        if not _fits(pool, choices) or sync_margin(pool, choices, workload) is not Margin.SAFE:
            break
        staying = PoolUse(choices, Margin.SAFE)
        if best is None or staying.total < best.total:
            best = staying
    return best


def _receiving_awake(pool: Pool, use: PoolUse, workload: Workload) -> PoolUse:
    """Return the use in which engines are awake while they receive weights, or ``use`` where that does not fit.

    The role that sends the weights then keeps the memory that they go through.
    """
    demands, choices = {demand.role: demand for demand in pool.demands}, dict(use.choices)
    for sync in workload.weight_syncs:
        if sync.source in choices and sync.target in choices and choices[sync.target].layout.sleeps:
            buffers = sync_memory(sync, demands, choices, pool.host_set.sharp, same_gpus=True)
            source, target = choices[sync.source], choices[sync.target]
            kept = {term: buffers.get(term, 0.0) for term in ("gathered", "buffer")}
            choices[sync.source] = replace(source, idle={**source.idle, **kept})
            choices[sync.target] = replace(target, layout=replace(target.layout, receives_awake=True))
    fits = _fits(pool, choices) and sync_margin(pool, choices, workload) is Margin.SAFE
    return replace(use, choices=choices) if fits else use


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
