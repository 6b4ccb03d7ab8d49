"""The degrees of parallelism that a role may have in its pool."""

from dataclasses import replace

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.planner.pool import Pool, Shortage


def group_sizes(demand: Demand, most: int) -> list[int]:
    """Return the sizes of groups that can share the heads: powers of two, and divisors of a pinned number of GPUs."""
    gpus = demand.pinned("gpus")
    sizes = {2**n for n in range(most.bit_length())} | {n for n in range(1, most + 1) if gpus and gpus % n == 0}
    return [size for size in sorted(sizes) if size <= most and demand.shares_heads(size)]


def pipeline_stages(demand: Demand, group: int) -> int | None:
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
