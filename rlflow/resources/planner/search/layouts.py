"""The layouts of a role that trains or scores: degrees, checkpointing, and the largest micro-batch that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from math import ceil, floor, inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import score_terms, update_terms
from rlflow.resources.memory.state import Terms, total_gib
from rlflow.resources.planner.pool import (
    CPU_MICRO_BATCH_TOKENS,
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    base_layout,
    idle_terms,
)
from rlflow.resources.planner.prediction.task_times import task_seconds
from rlflow.resources.planner.search.degrees import group_sizes, pipeline_stages, with_data_parallel_size
from rlflow.resources.workload import Task

MAX_MICRO_BATCH_TOKENS = 65536
# A search needs the same layouts again and again, for other roles and in other pools.
_update_terms = lru_cache(maxsize=2**14)(update_terms)


def model_options(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool
) -> Iterator["ModelOption | Shortage"]:
    """Yield the options of a role that trains or scores: sequence parallelism and checkpointing."""
    idle = idle_terms(demand, policy, pool)
    # On as many GPUs, more ranks for a sequence, and checkpointing, save memory and no time.
    fastest: ModelOption | None = None
    for layout in _sequence_layouts(demand, policy, pool):
        if isinstance(layout, Shortage):
            yield layout
        elif layout.offload == "weights" and layout.zero_stage != 3:
            yield Shortage(demand.role, inf, "weights can be offloaded in ZeRO stage 3 only")
        else:
            if fastest is not None and layout.num_gpus != fastest.layout.num_gpus:
                fastest = None
            pinned = demand.pins.gradient_checkpointing
            both = demand.trains and pinned == "auto" and pool.counts_memory
            for saves in (False, True) if both else (pinned is True and demand.trains,):
                option = ModelOption(demand, tasks, pool, replace(layout, gradient_checkpointing=saves), idle, fastest)
                fastest = fastest or option
                yield option


def _sequence_layouts(demand: Demand, policy: PoolPolicy, pool: Pool) -> Iterator[Layout | Shortage]:
    """Yield layouts with each sequence parallelism that divides the heads and fits a host (Jacobs et al. 2023)."""
    static = base_layout(demand, policy, pool)
    pinned = demand.pinned("sequence_parallel_size")
    sizes = [pinned] if pinned else group_sizes(demand, min(pool.largest_group, pool.gpus))
    for size in sizes if demand.architecture else sizes[:1]:
        stages = pipeline_stages(demand, static.tensor_parallel_size * size) or static.pipeline_parallel_size
        layout = replace(static, sequence_parallel_size=size, pipeline_parallel_size=stages)
        yield with_data_parallel_size(demand, pool, layout, pool.groups(layout.group_size) // stages)


@dataclass(frozen=True)
class ModelOption:
    """The degrees of a role that trains or scores, whose micro-batch depends on the memory that is left.

    Where memory is not modelled, sequences that are not expected are ignored: each would be a micro-batch of its own.
    """

    demand: Demand
    tasks: Sequence[Task]
    pool: Pool
    layout: Layout
    idle: Terms
    fastest: "ModelOption | None"
    """An option that is at least as fast where memory is no limit."""

    @property
    def keeps_activations(self) -> bool:
        """Return whether the role is trained without gradient checkpointing."""
        return self.demand.trains and not self.layout.gradient_checkpointing

    @property
    def bound(self) -> Mapping[str, float]:
        """Return the times of the fastest option."""
        return self.seconds if self.fastest is None else self.fastest.seconds

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the time of each node with the largest micro-batch that the role can use."""
        return self._seconds(self._most)

    def least_seconds(self, available: float) -> Mapping[str, float] | None:
        """Return the least time of each node if the smallest possible micro-batch fits, else None."""
        return self.seconds if self._gib(self._least) <= available else None

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with the largest micro-batch that fits, and that the role can use."""
        needed = self._gib(self._least)
        if needed > available:
            empty = self._gib(0)
            what = f"{needed:.0f} GiB for {self._least} tokens"
            what = f"{empty:.0f} GiB before the first token" if empty > available else what
            return Shortage(self.demand.role, needed - available, f"{what}, of {available:.0f} GiB")
        tokens = self._most
        if self._least < tokens:
            tokens = largest_micro_batch(self._terms, self._least, tokens, available)
        layout = replace(self.layout, micro_batch_tokens=tokens)
        awake = self._terms(max(_longest_expected(self.tasks), tokens))
        seconds = self.seconds if tokens == self._most else self._seconds(tokens)
        return RoleChoice(layout, "update" if self.demand.trains else "score", awake, self.idle, seconds)

    @cached_property
    def _least(self) -> int:
        """Return the tokens of the smallest micro-batch: the longest sequence."""
        pinned, expected = self.demand.pins.micro_batch_tokens, _longest_expected(self.tasks)
        return max((task.longest for task in self.tasks), default=1) if pinned == "auto" else max(expected, pinned)

    @cached_property
    def _most(self) -> int:
        """Return the tokens of the largest micro-batch: as pinned, or a rank's share of the samples."""
        pinned = self.demand.pins.micro_batch_tokens
        if pinned != "auto":
            return pinned
        if not self.pool.counts_memory:
            return max(_longest_expected(self.tasks), CPU_MICRO_BATCH_TOKENS)
        ranks = max(1, self.layout.data_parallel_size)
        each = (ceil(task.tokens * task.epochs / task.minibatches / ranks) for task in self.tasks)
        return max(self._least, min(MAX_MICRO_BATCH_TOKENS, max(each, default=1)))

    @cached_property
    def _terms(self) -> Callable[[float], Terms]:
        """Return a function from the tokens of a micro-batch to the memory terms at its peak."""
        return cache(partial(_terms_of, self.demand, self.layout, self.pool))

    def _gib(self, tokens: float) -> float:
        return total_gib(self._terms(tokens))

    def _seconds(self, tokens: int) -> Mapping[str, float]:
        layout, moved = replace(self.layout, micro_batch_tokens=tokens), 0.0
        if layout.sleeps:
            awake = self._terms(max(_longest_expected(self.tasks), tokens))
            moved = sum(awake.get(term, 0.0) for term in ("weights", "gradients", "optimizer"))
        return task_seconds(self.demand, self.tasks, layout, self.pool.host_set.speed, kv_tokens=inf, moved_gib=moved)


def _terms_of(demand: Demand, layout: Layout, pool: Pool, tokens: float) -> Terms:
    model = demand.architecture
    if model is None or not pool.counts_memory:
        return {}
    if demand.trains:
        return _update_terms(model, layout, demand.training, tokens, sharp=pool.host_set.sharp)
    return score_terms(
        model, layout, tokens, weight_bytes=demand.weight_bytes, training=demand.training, sharp=pool.host_set.sharp
    )


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
