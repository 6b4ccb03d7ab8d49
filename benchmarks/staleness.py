"""Compare what ``grpo_tiny`` learns with tokens of different ages: ``python -m benchmarks.staleness [--seeds N]``.

Every run generates on one host and trains on the other. Deterministic overlap trains every step on tokens that are
exactly ``max_staleness`` versions old, the most that the bound allows.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish

STALENESS = (0, 1, 2, 4)
# The steps of a run, and how much less of the held-out score older tokens may reach on average over the seeds.
STEPS, LOSS = 150, 0.03


def curve(staleness: int, seed: int) -> list[float]:
    """Return the held-out scores of a run, from before training to its end."""
    overrides = (
        *("recipe=grpo_tiny", f"seed={seed}", f"steps={STEPS}", "evaluation.every=25", "roles.rollout.colocate=[]"),
        f"overlap.max_staleness={staleness}",
    )
    plan = rlflow.compile(rlflow.load(overrides), "1x2@cpu")
    with tempfile.TemporaryDirectory() as folder:
        report = rlflow.run(plan, Path(folder) / "run")
        return [line["evaluation/reward"] for line in report.history() if "evaluation/reward" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    table = Table("max_staleness", "seed", *(str(step) for step in range(0, STEPS + 1, 25)), title="held-out score")
    last: dict[int, list[float]] = {staleness: [] for staleness in STALENESS}
    for staleness in STALENESS:
        for seed in range(options.seeds):
            scores = curve(staleness, seed)
            table.add_row(str(staleness), str(seed), *(f"{score:.3f}" for score in scores))
            last[staleness].append(scores[-1])
    Console(width=110).print(table)
    means = {staleness: fmean(scores) for staleness, scores in last.items()}
    figures = {f"score_k{staleness}": mean for staleness, mean in means.items()}
    goals = {
        f"score_k{staleness}": Goal(f"at least {means[0] - LOSS:.2f}", mean >= means[0] - LOSS)
        for staleness, mean in means.items()
    }
    return finish("staleness", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
