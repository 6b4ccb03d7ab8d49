"""The layouts of a role that generates: tensor parallelism, pipeline stages, and the memory of its engines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, floor, inf
from typing import ClassVar

from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.phases import EngineMemory, StepLimits, generate_memory
from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.pools import PoolShape, RoleChoice, Shortage
from rlflow.resources.planner.prediction.task_times import MAX_NUM_SEQS, task_seconds
from rlflow.resources.planner.search.degrees import CPU_MICRO_BATCH_TOKENS, group_sizes, stages_from_pins, with_copies
from rlflow.resources.workload import Task

_MAX_UTILIZATION = 0.9
# The memory of an engine besides its KV cache, at most, over the predicted one: an estimate.
_ENGINE_ERROR = 1.1
# Pipeline stages that are tried where they are open.
_STAGES = (2, 4, 8)
# Hosts of an engine that are tried, at most.
_MOST_HOSTS = 8


def engine_options(
    demand: Demand, tasks: Sequence[Task], base: Layout, shape: PoolShape, host_set: HostSet
) -> Iterator["EngineOption | Shortage"]:
    """Yield the options of a role that generates: tensor parallelism, and pipeline stages."""
    sizes = _tensor_sizes(demand, shape)
    degrees = [
        (size, stages_from_pins(demand, size * base.sequence_parallel_size) or base.pipeline_parallel_size)
        for size in sizes
    ]
    model = demand.architecture
    if demand.pinned("pipeline_parallel_size") is None and model is not None and host_set.counts_memory:
        largest = shape.largest_group // base.sequence_parallel_size
        stages_of = {size: min(model.num_hidden_layers, largest // size) for size in sizes}
        degrees += [(size, stages) for size in sizes for stages in _STAGES if stages <= stages_of[size]]
        degrees += _degrees_over_hosts(demand, sizes[-1], shape, host_set)
    # Stages leave more memory for the KV cache. A full batch is no faster with them, nor is what is left of it.
    fastest: dict[int, EngineOption] = {}
    for size, stages in degrees:
        layout = with_copies(demand, shape, _layout(demand, size, host_set), base.sequence_parallel_size, stages)
        if isinstance(layout, Shortage):
            yield layout
        else:
            bound = fastest.get(size) if demand.pinned("data_parallel_size") is None else None
            option = EngineOption(demand, tasks, host_set, layout, bound)
            fastest.setdefault(size, option)
            yield option


def _degrees_over_hosts(demand: Demand, size: int, shape: PoolShape, host_set: HostSet) -> Iterator[tuple[int, int]]:
    """Yield the degrees of engines over several hosts, for a model that no host has room for.

    The stages of a host are tensor-parallel groups of ``size``, the largest. Adapters reach the engines of one host.
    """
    model, memory_gib = demand.architecture, host_set.memory_gib
    assert model is not None
    assert memory_gib is not None
    on_host = shape.largest_group // size
    weights_gib = demand.weight_bytes * model.num_parameters / GIB
    if demand.follows_lora is None and weights_gib > _MAX_UTILIZATION * memory_gib * on_host * size:
        most = min(shape.groups(on_host * size), model.num_hidden_layers // on_host)
        yield from ((size, hosts * on_host) for hosts in range(2, most + 1) if hosts <= _MOST_HOSTS)


def _tensor_sizes(demand: Demand, shape: PoolShape) -> list[int]:
    """Return the pinned size, or those that divide heads and experts and fit a host."""
    if (pinned := demand.pinned("tensor_parallel_size")) is not None:
        return [pinned]
    sizes = group_sizes(demand, shape.largest_group) if demand.architecture else [1]
    return [size for size in sizes if demand.divides_experts(size)]


def _expert_size(demand: Demand, tensor: int) -> int:
    """Return the GPUs of an engine that divide its experts: as pinned, or all where their width cannot be divided.

    By the formulas whole experts are never faster: each step waits for the GPU whose experts are wanted most.
    """
    model, pinned = demand.architecture, demand.pinned("expert_parallel_size")
    if pinned is not None or model is None or not model.num_experts:
        return pinned or 1
    return tensor if model.expert_width % tensor and model.num_experts % tensor == 0 else 1


def _layout(demand: Demand, tensor: int, host_set: HostSet) -> Layout:
    """Return the layout of engines of a size, without their number and their memory."""
    tokens, eager, serves = demand.pins.micro_batch_tokens, demand.pins.eager, "tensor" in demand.parallel
    return Layout(
        tensor_parallel_size=tensor,
        expert_parallel_size=_expert_size(demand, tensor),
        micro_batch_tokens=CPU_MICRO_BATCH_TOKENS if tokens == "auto" else tokens,
        eager=(not host_set.counts_memory if eager == "auto" else eager) if serves else None,
    )


@dataclass(frozen=True)
class EngineOption:
    """The degrees of a role that generates, whose KV cache depends on the memory that is left."""

    demand: Demand
    tasks: Sequence[Task]
    host_set: HostSet
    layout: Layout
    fastest: "EngineOption | None" = None
    """Engines without pipeline stages on the same GPUs, which are as fast where memory is no limit."""
    caution: ClassVar[float] = 1.0
    """The factor of its times in comparisons."""
    _by_share: dict[float, RoleChoice | Shortage] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the least time of each node: with a KV cache of any size."""
        return self._seconds(inf)

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with ``gpu_memory_utilization`` as pinned, or in steps of 0.05 all that is left."""
        demand, memory_gib = self.demand, self.host_set.memory_gib
        if demand.architecture is None or memory_gib is None:
            return RoleChoice(self.layout, "generate", {}, seconds=self.seconds)
        wanted = demand.pins.gpu_memory_utilization
        left = min(_MAX_UTILIZATION, floor(available / memory_gib * 20 + 1e-9) / 20)
        share = left if wanted == "auto" else wanted
        if share <= 0:
            return Shortage(demand.role, -available, "the other roles on its GPUs leave no memory")
        if share * memory_gib > available + 1e-9:
            rest = max(0, floor(available / memory_gib * 100)) / 100
            what = f"gpu_memory_utilization {share:g}, which is more than the {rest:g} that is left"
            return Shortage(demand.role, share * memory_gib - available, what)
        if share not in self._by_share:
            self._by_share[share] = self._serve(share)
        return self._by_share[share]

    def _serve(self, share: float) -> RoleChoice | Shortage:
        """Return the choice with a ``gpu_memory_utilization``."""
        demand, tasks = self.demand, self.tasks
        model, memory_gib = demand.architecture, self.host_set.memory_gib
        assert model is not None
        assert memory_gib is not None
        layout = replace(self.layout, gpu_memory_utilization=share)
        memory = self._memory(share)
        longest, states = self._longest, model.state_tokens(layout.tensor_parallel_size)
        if memory.kv_tokens < longest + states:
            rest = sum(gib for term, gib in memory.terms.items() if term != "kv")
            lacks = f"{rest:.0f} GiB on each GPU before the KV cache"
            lacks = f"no KV cache room for {longest} tokens" if rest < share * memory_gib else lacks
            what = f"tp {layout.tensor_parallel_size}, {lacks}, of {share * memory_gib:.0f} GiB available"
            return Shortage(demand.role, rest - share * memory_gib, what)
        seconds = self._seconds(memory.kv_tokens)
        typical = max((task.typical_length for task in tasks), default=1.0)
        sequences = self._sequences
        concurrency = min(sequences, memory.kv_tokens / (typical + states))
        terms = memory.terms
        if "tensor" not in demand.parallel:
            # Its KV cache grows with what it generates.
            layout = replace(layout, gpu_memory_utilization=None)
            filled = sequences * (longest + states) / memory.kv_tokens
            terms = terms | {"kv": terms["kv"] * min(1.0, filled)}
        return RoleChoice(
            layout, "generate", terms, seconds=seconds, kv_tokens=memory.kv_tokens, concurrency=concurrency
        )

    @cached_property
    def enough_gib(self) -> float:
        """Return the memory whose KV cache holds all samples, each as long as the longest; infinite where it is pinned.

        On shared GPUs more is a loss: each turn releases the KV cache and takes it again.
        """
        model, memory_gib = self.demand.architecture, self.host_set.memory_gib
        pinned = self.demand.pins.gpu_memory_utilization != "auto"
        if pinned or model is None or memory_gib is None or "tensor" not in self.demand.parallel:
            return inf
        memory = self._memory(1.0)
        tokens = self._sequences * (self._longest + model.state_tokens(self.layout.tensor_parallel_size))
        besides = sum(gib for term, gib in memory.terms.items() if term != "kv")
        needed = _ENGINE_ERROR * besides + (memory_gib - besides) * tokens / max(1.0, memory.kv_tokens)
        return ceil(needed / memory_gib * 20 - 1e-9) / 20 * memory_gib

    @cached_property
    def _longest(self) -> int:
        return max((task.longest for task in self.tasks), default=1)

    @cached_property
    def _sequences(self) -> float:
        """Return the most sequences of an engine at the same time."""
        shares = (task.samples * task.steps / self.layout.data_parallel_size for task in self.tasks)
        return min(MAX_NUM_SEQS, max(shares, default=1.0))

    def _memory(self, share: float) -> EngineMemory:
        demand, host_set = self.demand, self.host_set
        assert demand.architecture is not None
        assert host_set.memory_gib is not None
        return generate_memory(
            demand.architecture,
            replace(self.layout, gpu_memory_utilization=share),
            host_set.memory_gib,
            StepLimits(max_num_seqs=MAX_NUM_SEQS),
            weight_bytes=demand.weight_bytes,
            lora=demand.follows_lora,
            sharp=host_set.sharp,
        )

    def _seconds(self, kv_tokens: float) -> Mapping[str, float]:
        return task_seconds(self.demand, self.tasks, self.layout, self.host_set.speed, kv_tokens=kv_tokens)
