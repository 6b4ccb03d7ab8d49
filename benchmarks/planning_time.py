"""Measure how long planning takes, from a checked recipe to its plan.

``python -m benchmarks.planning_time [--json FILE]``

The cases are recipes on even and uneven clusters, and ten roles on a thousand GPUs: two policies with a critic, three
engines and four scoring models. Each figure is the median of five runs after a first one, which imports the solver.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler import compile_recipe
from rlflow.compiler.lower import Requirements, lower
from rlflow.compiler.plan import Plan
from rlflow.compiler.wire import wire
from rlflow.recipe.compose import load_cluster
from rlflow.resources.planner.search.search import Search
from rlflow.resources.workload import WeightSync, Workload

_REPEATS = 5


@dataclass(frozen=True)
class Case:
    cluster: str
    recipe: str | None
    """None: ten roles."""
    goal_s: float


CASES = (
    Case("2x8", "grpo_32b", 0.3),
    Case("16x8", "grpo_32b", 1.0),
    Case("128x8", None, 3.0),
    Case("127x8+1x7", None, 2.0),
    Case("7x8+1x7", "ppo_7b", 0.5),
    Case("1000x8", "grpo_7b", 3.0),
)


def ten_roles() -> Requirements:
    """Return the 32B recipe's roles and copies of them, ten in total."""
    recipe = rlflow.load(["recipe=grpo_32b"])
    given = lower(recipe, wire(recipe))
    demands = {demand.role: demand for demand in given.demands}
    tasks = {task.role: task for task in given.workload.tasks if task.role}
    written = ("rollout", "rollout_2", "rollout_3")
    scored = ("reference", "reference_2", "judge", "judge_2")
    kinds = {"rollout": written, "reference": scored, "actor": ("actor", "actor_2", "critic")}
    after: dict[str, tuple[str, ...]] = {"rollout": (), "reference": written, "actor": (*written, *scored)}
    return Requirements(
        demands=tuple(replace(demands[of], role=role) for of, roles in kinds.items() for role in roles),
        workload=Workload(
            tasks=tuple(
                replace(tasks[of], node=role, role=role, after=after[of], samples=tasks[of].samples * 8)
                for of in ("rollout", "reference", "actor")
                for role in kinds[of]
            ),
            weight_syncs=tuple(WeightSync(source="actor", target=role) for role in written),
        ),
    )


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans whose times are measured, without that of ten roles."""
    for case in CASES:
        if case.recipe is not None:
            yield rlflow.compile(rlflow.load([f"recipe={case.recipe}"]), case.cluster)


def seconds(case: Case) -> float:
    cluster = load_cluster(case.cluster)
    recipe = rlflow.load([f"recipe={case.recipe or 'grpo_32b'}"])
    many = ten_roles()
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        if case.recipe is not None:
            compile_recipe(recipe, cluster)
        else:
            assert Search(many.demands, many.workload, cluster, {}).best() is not None
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {f"seconds_{case.cluster}": seconds(case) for case in CASES}
    goals = {
        figure: Goal(f"under {case.goal_s:g}", value < case.goal_s)
        for (figure, value), case in zip(figures.items(), CASES, strict=True)
    }
    return finish("planning_time", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
