"""The layouts of a role that generates: tensor parallelism, pipeline stages, and the memory of its engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import floor, inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.phases import StepLimits, generate_memory
from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.pool import (
    CPU_MICRO_BATCH_TOKENS,
    Pool,
    PoolPolicy,
    RoleChoice,
    Shortage,
    idle_terms,
)
from rlflow.resources.planner.prediction.task_times import MAX_NUM_SEQS, task_seconds
from rlflow.resources.planner.search.degrees import group_sizes, pipeline_stages, with_data_parallel_size
from rlflow.resources.workload import Task

_MAX_UTILIZATION = 0.9
# Pipeline stages that are tried where they are open.
_STAGES = (2, 4, 8)


def engine_options(
    demand: Demand, tasks: Sequence[Task], policy: PoolPolicy, pool: Pool
) -> Iterator["EngineOption | Shortage"]:
    """Yield the options of a role that generates: tensor parallelism, and pipeline stages.

    Stages leave more memory for the KV cache. A full batch is no faster with them, nor is what is left of it.
    """
    pinned_stages = demand.pinned("pipeline_parallel_size")
    sequence = demand.pinned("sequence_parallel_size") or 1
    idle = idle_terms(demand, policy, pool)
    whole: dict[int, EngineOption] = {}
    for size in (sizes := _tensor_sizes(demand, pool)):
        stages = pinned_stages or pipeline_stages(demand, size * sequence) or 1
        layout = _degrees(demand, pool, size, stages)
        if isinstance(layout, Shortage):
            yield layout
        else:
            yield (option := EngineOption(demand, tasks, pool, layout, idle))
            whole[size] = option
    if pinned_stages is None and demand.architecture is not None and pool.counts_memory:
        for size, stages in product(sizes, _STAGES):
            layout = _degrees(demand, pool, size, stages)
            if isinstance(layout, Shortage):
                yield layout
            elif stages <= demand.architecture.num_hidden_layers:
                bound = whole.get(size) if demand.pinned("data_parallel_size") is None else None
                yield EngineOption(demand, tasks, pool, layout, idle, bound)


def _tensor_sizes(demand: Demand, pool: Pool) -> list[int]:
    """Return the pinned size, or those that divide the heads and fit a host."""
    if (pinned := demand.pinned("tensor_parallel_size")) is not None:
        return [pinned]
    return group_sizes(demand, pool.largest_group) if demand.architecture else [1]


def _degrees(demand: Demand, pool: Pool, tensor: int, stages: int) -> Layout | Shortage:
    """Return the layout of engines with these degrees, without its memory."""
    tokens = demand.pins.micro_batch_tokens
    serves = "tensor" in demand.parallel
    sequence = demand.pinned("sequence_parallel_size") or 1
    eager = not pool.counts_memory if demand.pins.eager == "auto" else demand.pins.eager
    layout = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        sequence_parallel_size=sequence,
        micro_batch_tokens=CPU_MICRO_BATCH_TOKENS if tokens == "auto" else tokens,
        eager=eager if serves else None,
        sleeps=pool.shared and serves and pool.counts_memory,
    )
    return with_data_parallel_size(demand, pool, layout, pool.groups(tensor * sequence) // stages)


@dataclass(frozen=True)
class EngineOption:
    """The degrees of a role that generates, whose KV cache depends on the memory that is left."""

    demand: Demand
    tasks: Sequence[Task]
    pool: Pool
    layout: Layout
    idle: Terms
    whole: "EngineOption | None" = None
    """Engines without pipeline stages on the same GPUs, which are as fast where memory is no limit."""

    @property
    def keeps_activations(self) -> bool:
        """Return False, because nothing is trained."""
        return False

    @property
    def bound(self) -> Mapping[str, float]:
        """Return the least time of each node without pipeline stages."""
        return self.seconds if self.whole is None else self.whole.seconds

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the least time of each node: with a KV cache of any size."""
        return self._seconds(inf)

    def least_seconds(self, available: float) -> Mapping[str, float] | None:
        """Return the time of each node with ``available`` GiB on each GPU; None if that is too little."""
        choice = self.choose(available)
        return choice.seconds if isinstance(choice, RoleChoice) else None

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with ``gpu_memory_utilization`` as pinned, or with all that is left in steps of 0.05."""
        demand, layout, memory_gib = self.demand, self.layout, self.pool.host_set.memory_gib
        if demand.architecture is None or memory_gib is None:
            return RoleChoice(layout, "generate", {}, self.idle, self.seconds)
        wanted = demand.pins.gpu_memory_utilization
        left = min(_MAX_UTILIZATION, floor(available / memory_gib * 20 + 1e-9) / 20)
        share = left if wanted == "auto" else wanted
        if share <= 0:
            return Shortage(demand.role, -available, "the other roles on its GPUs leave no memory")
        if share * memory_gib > available + 1e-9:
            rest = max(0, floor(available / memory_gib * 100)) / 100
            what = f"gpu_memory_utilization {share:g}, which is more than the {rest:g} that is left"
            return Shortage(demand.role, share * memory_gib - available, what)
        return self._of_share(share)

    @cached_property
    def _of_share(self) -> Callable[[float], RoleChoice | Shortage]:
        return cache(self._serve)

    def _serve(self, share: float) -> RoleChoice | Shortage:
        """Return the choice with a ``gpu_memory_utilization``."""
        demand, host_set, tasks = self.demand, self.pool.host_set, self.tasks
        model, memory_gib = demand.architecture, host_set.memory_gib
        assert model is not None
        assert memory_gib is not None
        layout = replace(self.layout, gpu_memory_utilization=share)
        memory = generate_memory(
            model,
            layout,
            memory_gib,
            StepLimits(max_num_seqs=MAX_NUM_SEQS),
            weight_bytes=demand.weight_bytes,
            lora=demand.follows_lora,
            sharp=host_set.sharp,
        )
        longest = max((task.longest for task in tasks), default=1)
        states = model.state_tokens(layout.tensor_parallel_size)
        if memory.kv_tokens < longest + states:
            rest = sum(gib for term, gib in memory.terms.items() if term != "kv")
            lacks = f"{rest:.0f} GiB on each GPU before the KV cache"
            lacks = f"no KV cache room for {longest} tokens" if rest < share * memory_gib else lacks
            what = f"tp {layout.tensor_parallel_size}, {lacks}, of {share * memory_gib:.0f} GiB available"
            return Shortage(demand.role, rest - share * memory_gib, what)
        seconds = self._seconds(memory.kv_tokens)
        typical = max((task.typical_length for task in tasks), default=1.0)
        each = max((task.samples / layout.data_parallel_size for task in tasks), default=1.0)
        concurrency = min(each, MAX_NUM_SEQS, memory.kv_tokens / (typical + states))
        terms = memory.terms
        if "tensor" not in demand.parallel:
            # Its KV cache grows with what it generates.
            layout = replace(layout, gpu_memory_utilization=None)
            filled = min(each, MAX_NUM_SEQS) * (longest + states) / memory.kv_tokens
            terms = terms | {"kv": terms["kv"] * min(1.0, filled)}
        return RoleChoice(layout, "generate", terms, self.idle, seconds, memory.kv_tokens, concurrency)

    def _seconds(self, kv_tokens: float) -> Mapping[str, float]:
        return task_seconds(self.demand, self.tasks, self.layout, self.pool.host_set.speed, kv_tokens=kv_tokens)
