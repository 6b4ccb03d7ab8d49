"""Compare what ``grpo_tiny`` learns with tokens of different ages: ``python -m benchmarks.staleness [--seeds N]``.

Every run generates on one host and trains on the other. Deterministic overlap trains every step on tokens that are
exactly ``max_staleness`` versions old, the most that the bound allows. From two versions on, runs are made twice: as
the recipe is, and with ``old_logprobs`` and a ``correction``, as the plan of such a recipe advises. The goal is for
runs as advised. Takes about an hour on two cores.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan

CORRECTED = (
    "graph.old_logprobs={node: logprobs, role: actor}",
    "graph.update.correction={level: token, outside: bound, max_ratio: 2}",
)
# The staleness of each run, and what the run adds to the recipe.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "k0": (0, ()),
    "k1": (1, ()),
    "k2_plain": (2, ()),
    "k4_plain": (4, ()),
    "k2": (2, CORRECTED),
    "k4": (4, CORRECTED),
}
# The steps of a run, and how much less of the held-out score older tokens may reach on average over the seeds.
STEPS, LOSS = 150, 0.03


def plan_of(staleness: int, added: tuple[str, ...], seed: int = 0) -> Plan:
    overrides = (
        *("recipe=grpo_tiny", f"seed={seed}", f"steps={STEPS}", "evaluation.every=25", "roles.rollout.colocate=[]"),
        f"overlap.max_staleness={staleness}",
        *added,
    )
    return rlflow.compile(rlflow.load(overrides), "1x2@cpu")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with one seed."""
    yield from (plan_of(*case) for case in CASES.values())


def curve(plan: Plan) -> list[float]:
    """Return the held-out scores of a run, from before training to its end."""
    with tempfile.TemporaryDirectory() as folder:
        report = rlflow.run(plan, Path(folder) / "run")
        return [line["evaluation/reward"] for line in report.history() if "evaluation/reward" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    table = Table("run", "seed", *(str(step) for step in range(0, STEPS + 1, 25)), title="held-out score")
    figures = {}
    for name, case in CASES.items():
        curves = [curve(plan_of(*case, seed)) for seed in range(options.seeds)]
        for seed, scores in enumerate(curves):
            table.add_row(name, str(seed), *(f"{score:.3f}" for score in scores))
        figures[f"score_{name}"] = fmean(scores[-1] for scores in curves)
    Console(width=110).print(table)
    least = figures["score_k0"] - LOSS
    goals = {
        name: Goal("for comparison", True) if name.endswith("plain") else Goal(f"at least {least:.2f}", mean >= least)
        for name, mean in figures.items()
    }
    return finish("staleness", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
