"""The degrees of parallelism that a role may have in its pool, and what follows from a policy for the whole pool."""

from dataclasses import dataclass, replace
from math import inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload, hosts_of_engine
from rlflow.resources.planner.pools import PoolShape, Shortage

# Micro-batches on CPUs, where memory is not modelled.
CPU_MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class PoolPolicy:
    """A decision for all roles of a pool: what stays on the GPUs while others work."""

    sleeps: bool = False
    """Trained and scoring roles move their state to the host's memory."""
    zero_stage: int = 3
    """The ZeRO stage of trained roles."""
    offload: Offload = "none"
    """The state that trained roles offload; ``weights`` applies to scoring roles too."""
    shards_scorers: bool = True
    """Models that only score are sharded, instead of complete on every GPU."""

    def state_of(self, demand: Demand) -> "tuple[int, Offload] | None":
        """Return the ZeRO stage of a role and the state that it offloads; None where its engine has no such options."""
        pins, trains = demand.pins, demand.job == "train"
        if demand.job == "serve" or "data" not in demand.parallel:
            return None
        if "replicate" in demand.parallel:
            # This engine shards all of the state or nothing, and offloads nothing.
            shards = trains or self.shards_scorers or (demand.pinned("tensor_parallel_size") or 1) > 1
            return 3 if shards else 0, "none"
        stage = self.zero_stage if trains else (3 if self.shards_scorers else 0)
        # A model that only scores can offload nothing except its weights.
        offload: Offload = self.offload if trains or self.offload == "weights" else "none"
        return (
            stage if pins.zero_stage == "auto" else pins.zero_stage,
            offload if pins.offload == "auto" else pins.offload,
        )


def base_layout(demand: Demand, state: tuple[int, Offload] | None, shape: PoolShape) -> Layout:
    """Return the layout of a role with its ZeRO stage and offloaded state, without what depends on memory."""
    stage, offload = state or (None, None)
    tensor, stages, sequence = (
        demand.pinned(f"{way}_parallel_size") or 1 for way in ("tensor", "pipeline", "sequence")
    )
    return Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        data_parallel_size=demand.pinned("data_parallel_size") or max(1, shape.groups(tensor * stages * sequence)),
        sequence_parallel_size=sequence,
        zero_stage=stage,
        offload=offload,
        micro_batch_tokens=CPU_MICRO_BATCH_TOKENS,
    )


def group_sizes(demand: Demand, largest: int) -> list[int]:
    """Return the sizes of groups that can share the heads: powers of two, and divisors of a pinned number of GPUs."""
    gpus = demand.pinned("gpus")
    sizes = {2**n for n in range(largest.bit_length())} | {n for n in range(1, largest + 1) if gpus and gpus % n == 0}
    return [size for size in sorted(sizes) if size <= largest and demand.shares_heads(size)]


def tensor_sizes(demand: Demand, base: Layout, shape: PoolShape) -> list[int]:
    """Return the sizes of tensor-parallel groups to try: as pinned, or all that fit a host where torch shards."""
    is_open = demand.pinned("tensor_parallel_size") is None and demand.architecture is not None and base.zero_stage == 3
    sizes = group_sizes(demand, shape.largest_group) if is_open else [base.tensor_parallel_size]
    return [size for size in sizes if "replicate" not in demand.parallel or demand.cuts_layers(size)]


def stages_from_pins(demand: Demand, group: int) -> int | None:
    """Return the pipeline stages that follow from pinned GPUs and copies for groups of a size; None: any."""
    gpus, copies = demand.pinned("gpus"), demand.pinned("data_parallel_size")
    is_open = demand.pinned("pipeline_parallel_size") is None
    if gpus is None or copies is None or not is_open or gpus % (copies * group):
        return None
    stages = gpus // (copies * group)
    return stages if demand.architecture is None or stages <= demand.architecture.num_hidden_layers else None


def replica_counts(demand: Demand, layout: Layout, shape: PoolShape) -> list[int]:
    """Return the numbers of replicas to try: one, and one for each host where hosts are full of ranks."""
    if demand.pins.num_replicas != "auto":
        return [demand.pins.num_replicas]
    ranks, group = layout.num_gpus, shape.largest_group
    fills_hosts = ranks % group == 0 and all(gpus % group == 0 for gpus, _ in shape.hosts)
    counts = {1, ranks // group} if fills_hosts and layout.zero_stage == 3 else {1}
    return [count for count in sorted(counts) if layout.data_parallel_size % count == 0]


def expert_sizes(demand: Demand, layout: Layout, shape: PoolShape) -> list[int]:
    """Return the sizes of groups that divide experts to try: powers of two that a host and a replica consist of.

    Tensor parallelism does not cut experts, so a group consists of tensor-parallel ones.
    """
    pinned = demand.pinned("expert_parallel_size")
    sizes = [pinned] if pinned else [2**n for n in range(shape.largest_group.bit_length())]
    num_experts = (demand.architecture.num_experts if demand.architecture else 0) or 1
    if demand.adapts_experts:
        return [1]
    width = layout.tensor_parallel_size
    divided = (num_experts, layout.num_shards * width, *(gpus for gpus, _ in shape.hosts))
    if num_experts > 1 and width > 1:
        sizes = [size for size in sizes if size % width == 0]
    return [size for size in sizes if size == 1 or (layout.zero_stage == 3 and all(n % size == 0 for n in divided))]


def with_copies(demand: Demand, shape: PoolShape, base: Layout, sequence: int, stages: int) -> Layout | Shortage:
    """Return the layout with these degrees, and with as many copies as pinned or as the pool has room for.

    A pinned number of GPUs is used in full.
    """
    width = base.tensor_parallel_size * sequence
    hosts = hosts_of_engine(stages, width, shape.largest_group)
    size = width * stages // hosts
    room = shape.groups(size) // hosts
    copies = demand.pinned("data_parallel_size") or room
    if copies < 1 or copies > room:
        groups = f"groups of {size} GPUs inside hosts" if size > 1 else "GPUs"
        what = f"{max(1, copies) * hosts} {groups}, where its pool has {shape.groups(size)}"
        return Shortage(demand.role, inf, what)
    layout = replace(
        base,
        sequence_parallel_size=sequence,
        pipeline_parallel_size=stages,
        hosts_per_engine=hosts,
        data_parallel_size=copies,
    )
    pinned = demand.pinned("gpus")
    if pinned is not None and "data" in demand.parallel and layout.num_gpus != pinned:
        return Shortage(demand.role, inf, f"only {layout.num_gpus} of its {pinned} pinned GPUs would be used")
    return layout
