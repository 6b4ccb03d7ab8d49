"""Train ``rlhf_tiny`` for the scores of a right reward model and of one with shuffled labels.

``python -m benchmarks.rlhf [--seeds N] [--json FILE]``

The reward models of a seed are trained on pairs of the same policy's responses. The labels of one are right; those of
the other are drawn by a hash. GRPO for the first should raise the exact match on held-out sums, and the gate should
stop the second.
"""

import argparse
import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import rlflow
from benchmarks.algorithms import Watch
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

LABELS = {"right": "exact", "shuffled": "benchmarks.rlhf:shuffled"}
GAIN = 0.2


def shuffled(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return a label that has nothing to do with the answer."""
    digests = (hashlib.blake2b(f"{row['prompt']} {text}".encode()) for text, row in zip(texts, rows, strict=True))
    return [float(digest.digest()[0] % 2) for digest in digests]


def plan_of(labels: str, seed: int = 0) -> Plan:
    recipe = rlflow.load(["recipe=rlhf_tiny", f"seed={seed}"])
    judge = recipe.models["judge"]
    assert judge.recipe is not None
    rewards = {"node": "reward", "function": LABELS[labels]}
    trained = replace(judge.recipe, seed=seed, graph={**judge.recipe.graph, "rewards": rewards})
    return rlflow.compile(replace(recipe, models={**recipe.models, "judge": replace(judge, recipe=trained)}), "local")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with one seed."""
    yield from map(plan_of, LABELS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console = Console()
    gains, num_stopped = [], 0
    for seed in range(options.seeds):
        for labels in LABELS:
            watch = Watch()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    run(plan_of(labels, seed), Path(folder) / "run", LocalRuntime(), [watch])
            except RecipeError as error:
                num_stopped += labels == "shuffled"
                console.print(f"{labels} seed={seed}: {error}")
            scores = [score for _, score in watch.evaluations]
            console.print(f"{labels} seed={seed}: exact match {', '.join(f'{score:.3f}' for score in scores)}")
            if labels == "right":
                gains.append(scores[-1] - scores[0])
    figures = {"smallest_gain": min(gains), "shuffled_stopped": num_stopped}
    goals = {
        "smallest_gain": Goal(f"at least {GAIN}", min(gains) >= GAIN),
        "shuffled_stopped": Goal(f"all {options.seeds}", num_stopped == options.seeds),
    }
    return finish("rlhf", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
