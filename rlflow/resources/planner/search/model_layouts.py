"""The layouts of a role that trains or scores: degrees, checkpointing, and the largest micro-batch that fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import Terms, total_gib
from rlflow.resources.planner.confidence import TIME_ERROR
from rlflow.resources.planner.hosts import HostSet
from rlflow.resources.planner.pools import PoolShape, RoleChoice, Shortage
from rlflow.resources.planner.prediction.role_memory import largest_micro_batch, working_terms
from rlflow.resources.planner.prediction.task_times import task_seconds
from rlflow.resources.planner.search.degrees import (
    CPU_MICRO_BATCH_TOKENS,
    expert_sizes,
    group_sizes,
    replica_counts,
    stages_from_pins,
    tensor_sizes,
    with_copies,
)
from rlflow.resources.workload import Task

MAX_MICRO_BATCH_TOKENS = 65536
# A larger micro-batch that saves less than this share of the time is not worth its memory.
_NEGLIGIBLE = 0.01


def model_options(
    demand: Demand, tasks: Sequence[Task], base: Layout, shape: PoolShape, host_set: HostSet
) -> Iterator["ModelOption | Shortage"]:
    """Yield the options of a role that trains or scores: sequence parallelism and checkpointing."""
    # On as many GPUs, more ranks for a sequence, checkpointing, and more reductions, save memory and no time.
    fastest: dict[tuple[int | None, ...], ModelOption] = {}
    kept = _kept_layers(demand, host_set)
    for layout in _sequence_layouts(demand, base, shape):
        if isinstance(layout, Shortage):
            yield layout
        elif layout.offload == "weights" and layout.zero_stage != 3:
            yield Shortage(demand.role, inf, "weights can be offloaded in ZeRO stage 3 only")
        else:
            key = layout.num_gpus, layout.num_replicas, layout.expert_parallel_size, layout.tensor_parallel_size
            for kept_layers in kept:
                option = ModelOption(demand, tasks, host_set, layout, kept_layers, fastest.get(key))
                fastest.setdefault(key, option)
                yield option


def _kept_layers(demand: Demand, host_set: HostSet) -> list[int | None]:
    """Return the numbers of layers to keep with checkpointing: none, half, three quarters; None: no checkpointing."""
    pinned = demand.pins.gradient_checkpointing if demand.job == "train" else False
    if pinned == "auto" and not host_set.counts_memory:
        pinned = False
    if pinned is False:
        return [None]
    num_layers = demand.architecture.num_hidden_layers if demand.architecture else 1
    kept = {0, num_layers // 2, num_layers * 3 // 4} if pinned == "auto" else {0}
    if demand.pins.kept_layers != "auto":
        kept = {min(demand.pins.kept_layers, num_layers)}
    return [*([None] if pinned == "auto" else []), *sorted(kept)]


def _sequence_layouts(demand: Demand, base: Layout, shape: PoolShape) -> Iterator[Layout | Shortage]:
    """Yield layouts with each sequence and tensor parallelism that divides the heads and fits a host.

    Sequences are divided as in Jacobs et al. 2023. Both at once are tried where one of them is pinned.
    """
    pinned = demand.pinned("sequence_parallel_size")
    sizes = [pinned] if pinned else group_sizes(demand, min(shape.largest_group, shape.num_gpus))
    for width, size in product(tensor_sizes(demand, base, shape), sizes if demand.architecture else sizes[:1]):
        is_open = pinned is None and demand.pinned("tensor_parallel_size") is None
        if width > 1 and (not demand.shares_heads(width * size) or (size > 1 and is_open)):
            continue
        wide = replace(base, tensor_parallel_size=width)
        stages = stages_from_pins(demand, width * size) or base.pipeline_parallel_size
        layout = with_copies(demand, shape, wide, size, stages)
        if isinstance(layout, Shortage) or "replicate" not in demand.parallel:
            yield layout
        else:
            yield from _replica_layouts(demand, layout, shape)


def _replica_layouts(demand: Demand, layout: Layout, shape: PoolShape) -> Iterator[Layout | Shortage]:
    """Yield a layout with the replicas and groups of experts to try.

    Gradients are reduced once in a step or in each pass.
    """
    for count in replica_counts(demand, layout, shape):
        if layout.data_parallel_size % count:
            what = f"{count} replicas cannot share {layout.data_parallel_size} data-parallel ranks evenly"
            yield Shortage(demand.role, inf, what)
            continue
        replicas = replace(layout, num_replicas=count)
        sizes = expert_sizes(demand, replicas, shape)
        if not sizes:
            what = f"its experts, or {replicas.num_shards} ranks, cannot be divided into groups as pinned"
            yield Shortage(demand.role, inf, what)
        for size, once in product(sizes, (True, False) if demand.job == "train" else (False,)):
            yield replace(replicas, expert_parallel_size=size, reduces_once=once)


@dataclass(frozen=True)
class ModelOption:
    """The degrees of a role that trains or scores, whose micro-batch depends on the memory that is left.

    Where memory is not modelled, sequences that are not expected are ignored: each would be a micro-batch of its own.
    """

    demand: Demand
    tasks: Sequence[Task]
    host_set: HostSet
    degrees: Layout
    """Its layout without checkpointing and the size of micro-batches."""
    kept_layers: int | None
    """The layers whose activations are kept with gradient checkpointing; None: there is no checkpointing."""
    fastest: "ModelOption | None" = None
    """An option that is at least as fast where memory is no limit."""
    _terms_by_tokens: dict[int, Terms] = field(default_factory=dict, compare=False, repr=False)
    _timed_by_tokens: dict[int, tuple[Layout, Mapping[str, float]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def caution(self) -> float:
        """Return the factor of its times in comparisons: their error, as far as an update keeps activations.

        Gradient checkpointing saves memory for certain, and costs time only as far as the prediction is right.
        """
        if self.demand.job != "train" or self.demand.architecture is None:
            return 1.0
        kept_share = 1.0
        if self.kept_layers is not None:
            kept_share = self.kept_layers / self.demand.architecture.num_hidden_layers
        return 1 + TIME_ERROR * kept_share

    @cached_property
    def layout(self) -> Layout:
        """Return its layout with the largest micro-batch that the role can use."""
        checkpoints, kept_layers = self.kept_layers is not None, self.kept_layers or 0
        return replace(
            self.degrees,
            gradient_checkpointing=checkpoints,
            kept_layers=kept_layers,
            micro_batch_tokens=self._most,
            micro_batch_patches=self._patches(self._most),
        )

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the time of each node in this layout."""
        return self._timed(self._most)[1]

    def choose(self, available: float) -> RoleChoice | Shortage:
        """Return the choice with the largest micro-batch that fits, or a smaller one that is hardly slower."""
        needed = self._gib(self._least)
        if needed > available:
            empty = self._gib(0)
            what = f"{needed:.0f} GiB for {self._least} tokens"
            what = f"{empty:.0f} GiB before the first token" if empty > available else what
            return Shortage(self.demand.role, needed - available, f"{what}, of {available:.0f} GiB")
        tokens = self._most
        if self._least < tokens:
            tokens = self._as_fast(largest_micro_batch(self._gib, self._least, tokens, available))
        return self.with_tokens(tokens)

    def with_tokens(self, most: int) -> RoleChoice:
        """Return the choice with at most so many tokens in a micro-batch, but with the longest sequence."""
        tokens = max(min(self._least, self._most), min(most, self._most))
        layout, seconds = self._timed(tokens)
        awake = self._terms(max(self._longest_expected, tokens))
        return RoleChoice(layout, "update" if self.demand.job == "train" else "score", awake, seconds=seconds)

    def _as_fast(self, tokens: int) -> int:
        """Return a half, a quarter and so on of the tokens, as long as that is hardly slower."""
        most = (1 + _NEGLIGIBLE) * sum(self._timed(tokens)[1].values())
        while tokens // 2 >= self._least and sum(self._timed(tokens // 2)[1].values()) <= most:
            tokens //= 2
        return tokens

    @cached_property
    def _longest_expected(self) -> int:
        return max((task.longest for task in self.tasks if task.is_expected), default=1)

    @cached_property
    def _least(self) -> int:
        """Return the tokens of the smallest micro-batch: the longest sequence."""
        pinned = self.demand.pins.micro_batch_tokens
        if pinned != "auto":
            return max(self._longest_expected, pinned)
        return max((task.longest for task in self.tasks), default=1)

    @cached_property
    def _most(self) -> int:
        """Return the tokens of the largest micro-batch: as pinned, or a rank's share of the samples."""
        pinned = self.demand.pins.micro_batch_tokens
        if pinned != "auto":
            return pinned
        if not self.host_set.counts_memory:
            return max(self._longest_expected, CPU_MICRO_BATCH_TOKENS)
        ranks = self.degrees.data_parallel_size
        shares = (ceil(task.tokens * task.epochs / task.minibatches / ranks) for task in self.tasks)
        return max(self._least, min(MAX_MICRO_BATCH_TOKENS, max(shares, default=1)))

    def _patches(self, tokens: int) -> int | None:
        """Return the patches of a micro-batch: as many as are expected for its tokens, or in the longest prompt."""
        pinned, model = self.demand.pins.micro_batch_patches, self.demand.architecture
        tower = None if model is None else model.vision
        if pinned != "auto" or tower is None or not self.host_set.counts_memory:
            return None if pinned == "auto" else pinned
        shares = (task.image_tokens * task.samples / task.tokens for task in self.tasks)
        longest = max((task.prompts.longest for task in self.tasks), default=1.0)
        return ceil(tower.patches_per_token * max(longest, tokens * max(shares, default=0.0)))

    def _terms(self, tokens: int) -> Terms:
        """Return the memory terms at the peak of a micro-batch."""
        if self.demand.architecture is None or not self.host_set.counts_memory:
            return {}
        if tokens not in self._terms_by_tokens:
            layout, patches = self.layout, self._patches(tokens)
            if patches != layout.micro_batch_patches:
                layout = replace(layout, micro_batch_patches=patches)
            self._terms_by_tokens[tokens] = working_terms(self.demand, layout, tokens, self.host_set.sharp)
        return self._terms_by_tokens[tokens]

    def _gib(self, tokens: int) -> float:
        return total_gib(self._terms(tokens))

    def _timed(self, tokens: int) -> tuple[Layout, Mapping[str, float]]:
        """Return the layout with a size of micro-batches, and the time of each node."""
        if tokens not in self._timed_by_tokens:
            patches = self._patches(tokens)
            layout = replace(self.layout, micro_batch_tokens=tokens, micro_batch_patches=patches)
            seconds = task_seconds(self.demand, self.tasks, layout, self.host_set.speed, kv_tokens=inf)
            self._timed_by_tokens[tokens] = layout, seconds
        return self._timed_by_tokens[tokens]
