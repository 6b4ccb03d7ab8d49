"""Compare layouts that the planner chooses for generation ahead of training with the best that any search finds.

``python -m benchmarks.overlap_search [--cases 60] [--seed 0] [--json FILE]``

Each case is a random recipe of GRPO: a model, a cluster, lengths, and the rules of ``overlap``. Generation and training
share GPUs, have GPUs of their own, or leave that to the planner. The step of the plan is compared with the shortest
simulated one among all ways to share, all sizes of pools, and each tensor parallelism of the engines. A layout counts
only if it is as safe as the plan. The planner simulates few of them. Takes about four minutes of a CPU.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.lower import Requirements, lower
from rlflow.compiler.plan import Plan
from rlflow.compiler.wire import wire
from rlflow.recipe.compose import load_cluster
from rlflow.resources.cluster import Cluster
from rlflow.resources.planner.candidate import Candidate
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import describe_pools
from rlflow.resources.planner.prediction.overlap_prediction import step_seconds
from rlflow.resources.planner.search.host_placement import place
from rlflow.resources.planner.search.search import Search

_GOAL = 0.02
# Models with the clusters that are drawn for them.
_CLUSTERS = {
    "qwen2_5_1_5b": ("1x4", "1x8"),
    "qwen2_5_7b": ("1x8", "2x8"),
    "qwen2_5_14b": ("1x8", "2x8", "3x8"),
    "qwen2_5_32b": ("2x8", "4x8"),
    "llama3_1_70b": ("4x8", "8x8"),
}
_KINDS = ("h100_80gb", "a100_80gb", "h200")
_RULES = ("wait, deterministic: true", "wait, deterministic: false", "keep, deterministic: false")
# Pins of the role that generates.
_SHARING = {
    "open": (),
    "shared": ("roles.rollout.colocate=[actor,reference]",),
    "apart": ("roles.rollout.colocate=[]",),
}
_TENSOR_SIZES = (None, 1, 2, 4, 8)
# A simulated step is not so much shorter than its schedule.
_OVER_SCHEDULE = 0.7


@dataclass(frozen=True)
class Case:
    """A recipe with overlap on a cluster."""

    arguments: tuple[str, ...]
    cluster: str

    def __str__(self) -> str:
        return f"{self.cluster} {' '.join(self.arguments[1:])}"


@dataclass(frozen=True)
class Found:
    """A layout and its simulated step."""

    seconds: float
    candidate: Candidate

    def __str__(self) -> str:
        width = self.candidate.choices["rollout"].layout.tensor_parallel_size
        return f"{self.seconds:.1f} s with {describe_pools(self.candidate.partition, self.candidate.gpus)}, tp {width}"


def random_cases(count: int, seed: int) -> Iterator[Case]:
    """Yield random recipes; the ways to share and the values of ``max_staleness`` take turns."""
    draw = random.Random(seed)
    for index in range(count):
        model = draw.choice(list(_CLUSTERS))
        staleness, sharing = (1, 2, 4)[index % 3], list(_SHARING)[index // 3 % 3]
        arguments = (
            "recipe=grpo_7b",
            f"model@models.policy={model}",
            "evaluation=null",
            f"data.batch_size={draw.choice((64, 128, 256, 512))}",
            f"graph.rollouts.max_tokens={draw.choice((1024, 4096, 8192, 16384))}",
            f"overlap={{max_staleness: {staleness}, in_flight: {draw.choice(_RULES)}}}",
            *_SHARING[sharing],
        )
        yield Case(arguments, f"{draw.choice(_CLUSTERS[model])}@{draw.choice(_KINDS)}")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the first cases, with each way to share."""
    for case in random_cases(9, 0):
        yield rlflow.compile(rlflow.load(case.arguments), case.cluster)


def chosen(needs: Requirements, cluster: Cluster) -> Found | None:
    """Return the layout that the planner chooses; None where nothing fits."""
    search = Search(needs.demands, needs.workload, cluster, {})
    result = search.best()
    return None if result is None else Found(step_seconds(result.candidate, search.inputs), result.candidate)


def best(needs: Requirements, cluster: Cluster, plan: Found) -> Found:
    """Return the layout with the shortest simulated step, which may be that of the plan."""
    found = plan
    for size in _TENSOR_SIZES:
        demands = [
            replace(demand, pins=replace(demand.pins, tensor_parallel_size=size or "auto"))
            if demand.job == "serve"
            else demand
            for demand in needs.demands
        ]
        search = Search(demands, needs.workload, cluster, {})
        safe = (candidate for candidate in search.candidates() if candidate.margin <= plan.candidate.margin)
        for candidate in sorted(safe, key=lambda candidate: candidate.schedule.step_seconds):
            found = min(found, *_placed(candidate, search, found, plan.candidate.margin), key=lambda one: one.seconds)
    return found


def _placed(candidate: Candidate, search: Search, found: Found, margin: Margin) -> Sequence[Found]:
    """Return a candidate on its hosts with its simulated step, unless that is certainly longer than what was found."""
    if _OVER_SCHEDULE * candidate.schedule.step_seconds > found.seconds:
        return [found]
    placed = place(candidate, search.pools)
    if placed is None or placed.candidate.margin > margin:
        return [found]
    return [found, Found(step_seconds(placed.candidate, search.inputs), placed.candidate)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    slower, planning = [], []
    for case in random_cases(10 * arguments.cases, arguments.seed):
        recipe, cluster = rlflow.load(case.arguments), load_cluster(case.cluster)
        needs = lower(recipe, wire(recipe))
        start = time.process_time()
        plan = chosen(needs, cluster)
        if plan is None:
            continue
        planning.append(time.process_time() - start)
        other = best(needs, cluster, plan)
        slower.append(plan.seconds / other.seconds - 1)
        better = f", where there is {other}" if slower[-1] else ""
        print(f"{slower[-1]:6.1%} slower: {plan}{better}: {case} ({planning[-1]:.1f} s)", flush=True)
        if len(slower) == arguments.cases:
            break
    figures = {"slower_max": max(slower), "slower_mean": sum(slower) / len(slower), "cases": len(slower)}
    goals = {
        "slower_max": Goal(f"at most {_GOAL:g}", figures["slower_max"] <= _GOAL),
        "slower_mean": Goal("any", True),
        "cases": Goal(f"{arguments.cases}", len(slower) == arguments.cases),
    }
    return finish("overlap_search", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
