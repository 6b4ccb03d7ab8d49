"""Compare the samples that ``curriculum_tiny`` needs with those of uniform sampling.

``python -m benchmarks.curriculum [--seeds N] [--json FILE]``

Both runs of a seed start from the same model and differ only in the node ``curriculum``. Each ends when an evaluation
on held-out sums, equally many of one to four digits, has reached the target, or after its last step. The beginner adds
numbers with one digit. Sums of three and four digits, half of all, stay out of reach of both runs.
"""

import argparse
import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.algorithms import Watch
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

CASES = {"uniform": ("~graph.curriculum",), "curriculum": ()}
# The exact match to reach, and the most samples for it in units of those of uniform sampling.
TARGET, MOST = 0.44, 0.7


def plan_of(case: str, seed: int = 0) -> Plan:
    return rlflow.compile(rlflow.load(["recipe=curriculum_tiny", f"seed={seed}", *CASES[case]]), "local")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with one seed."""
    yield from map(plan_of, CASES)


def samples_to_target(plan: Plan) -> tuple[int, list[float]]:
    """Return the samples of a run until an evaluation has reached the target, or of all its steps, and its scores."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        run(
            plan,
            Path(folder) / "run",
            LocalRuntime(),
            [watch],
            stop=lambda: bool(watch.evaluations) and watch.evaluations[-1][1] >= TARGET,
        )
    recipe, scores = plan.recipe, [score for _, score in watch.evaluations]
    assert recipe.evaluation is not None
    samples = recipe.data.batch_size * recipe.graph["rollouts"].get("group_size", 8) * recipe.evaluation.every
    return samples * (len(scores) - 1), scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console, table = Console(), Table("seed", *CASES, "ratio", title=f"samples to an exact match of {TARGET}")
    ratios = []
    for seed in range(options.seeds):
        samples, reached = {}, {}
        for case in CASES:
            samples[case], scores = samples_to_target(plan_of(case, seed))
            reached[case] = scores[-1] >= TARGET
            console.print(f"{case} seed={seed}: {', '.join(f'{score:.3f}' for score in scores)}")
        ratios.append(samples["curriculum"] / samples["uniform"] if reached["curriculum"] else inf)
        table.add_row(
            str(seed), *(f"{'' if reached[case] else 'over '}{samples[case]:,}" for case in CASES), f"{ratios[-1]:.2f}"
        )
    console.print(table)
    figures = {"samples_ratio": max(ratios)}
    return finish("curriculum", figures, {"samples_ratio": Goal(f"at most {MOST}", max(ratios) <= MOST)}, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
