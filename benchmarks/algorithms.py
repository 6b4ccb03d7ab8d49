"""Whether every algorithm learns: ``python -m benchmarks.algorithms [--seeds N] [--only NAME,...] [--json FILE]``.

Each tiny recipe in this process, those of a task from the same model. The gain in held-out reward, or in accuracy on
held-out pairs, smallest over the seeds, and the time of the longest run.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish

ALGORITHMS = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "remax", "grpo_lora"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "distill", "dpo", "rm"),
    # GRPO in turns with an environment.
    *("calculator", "guessing"),
)
_GAIN = 0.2


def run(algorithm: str, seed: int) -> tuple[float, float, float]:
    """The held-out reward before and after, and seconds."""
    recipe = rlflow.load([f"recipe={algorithm}_tiny", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        report = rlflow.run(rlflow.compile(recipe, "local"), Path(folder) / "run")
    assert report.eval_before is not None
    assert report.eval_after is not None
    return report.eval_before, report.eval_after, report.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=ALGORITHMS)
    options = parser.parse_args()
    only: Sequence[str] = options.only
    table = Table("recipe", "before", "after, by seed", "smallest gain", "seconds")
    figures: dict[str, float] = {}
    for algorithm in only:
        runs = [run(algorithm, seed) for seed in range(options.seeds)]
        figures[f"gain_{algorithm}"] = gain = min(after - before for before, after, _ in runs)
        befores, afters = (", ".join(f"{each[at]:.3f}" for each in runs) for at in (0, 1))
        table.add_row(f"{algorithm}_tiny", befores, afters, f"{gain:.3f}", f"{max(each[2] for each in runs):.0f}")
    Console().print(table)
    goals = {name: Goal(f"at least {_GAIN}", gain >= _GAIN) for name, gain in figures.items()}
    return finish("algorithms", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
