"""Train every tiny recipe and report what it learns.

``python -m benchmarks.algorithms [--seeds N] [--only NAME,...] [--json FILE]``

The recipes run in this process. Recipes of one task start from the same model, and ``sft`` starts from random weights.
The table shows the held-out reward, or the accuracy on held-out pairs, before and after training for each seed; the
smallest gain; the time of the longest run, without that of the recipe whose model it starts from; and the longest time
until an evaluation reached the required gain.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.recipe import Model
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Observer
from rlflow.runtime.run import run

ALGORITHMS = (
    *("sft", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "remax", "grpo_lora"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "distill", "dpo", "rm"),
    *("online_dpo", "kto", "rlhf", "distill_top"),
    # GRPO in turns with an environment, on a task of a library, and with agents.
    *("calculator", "guessing", "reasoning_gym", "tools", "one_behind"),
)
_EXAMPLES = Path(__file__).parents[1] / "examples" / "verifiers"
# The gain that is required of a recipe.
_GAIN = 0.2
_GAINS = {
    **dict.fromkeys(("online_dpo", "kto", "distill_top", "reasoning_gym"), 0.35),
    **{"tools": 0.9, "one_behind": 0.75},
}


@dataclass(frozen=True)
class Learned:
    before: float
    after: float
    seconds: float
    enough_s: float
    """Seconds until an evaluation reached the required gain."""

    @property
    def gain(self) -> float:
        return self.after - self.before


class Watch(Observer):
    """An observer that records the evaluations of a run, each with the seconds since its start.

    The evaluations of runs before it, which train its models, are left out.
    """

    def __init__(self) -> None:
        self.evaluations: list[tuple[float, float]] = []

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self.evaluations.clear()
        self._began = time.perf_counter()

    def evaluated(self, step: int, figure: float) -> None:
        self.evaluations.append((time.perf_counter() - self._began, figure))


def plan_of(algorithm: str, seed: int = 0) -> Plan:
    if algorithm != "one_behind":
        return rlflow.compile(rlflow.load([f"recipe={algorithm}_tiny", f"seed={seed}"]), "local")
    if str(_EXAMPLES) not in sys.path:  # here, and in processes that this one starts
        sys.path.insert(0, str(_EXAMPLES))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return rlflow.compile(rlflow.load(["recipe=one_behind", f"seed={seed}"], _EXAMPLES), "local")


def required_gain(algorithm: str) -> float:
    return _GAINS.get(algorithm, _GAIN)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs."""
    yield from map(plan_of, ALGORITHMS)


def learned(algorithm: str, seed: int) -> Learned:
    plan = plan_of(algorithm, seed)
    with tempfile.TemporaryDirectory() as folder:
        if algorithm == "sft":
            return from_examples(plan, Path(folder))
        watch = Watch()
        report = run(plan, Path(folder) / "run", LocalRuntime(), [watch])
    (_, before), (_, after) = watch.evaluations[0], watch.evaluations[-1]
    enough_s = next(
        (seconds for seconds, figure in watch.evaluations if figure - before >= required_gain(algorithm)), inf
    )
    return Learned(before, after, report.seconds, enough_s)


def from_examples(plan: Plan, folder: Path) -> Learned:
    """Run a plan without evaluation, and evaluate its model before and after."""
    report = run(plan, folder / "run", LocalRuntime())
    made = Model(path=report.models["actor"], dtype="float32")
    before, after = (
        exact_match(model, folder / name) for name, model in {"0": plan.recipe.models["policy"], "1": made}.items()
    )
    return Learned(before, after, report.seconds, report.seconds if after - before >= _GAIN else inf)


def exact_match(model: Model, folder: Path) -> float:
    """Return a model's exact match on the held-out prompts of grpo_tiny, in a run that stops before its first step."""
    recipe, watch = rlflow.load(["recipe=grpo_tiny"]), Watch()
    plan = rlflow.compile(replace(recipe, models={"policy": model}), "local")
    run(plan, folder, LocalRuntime(), [watch], stop=lambda: True)
    return watch.evaluations[0][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=ALGORITHMS)
    options = parser.parse_args()
    only: Sequence[str] = options.only
    console = Console()
    table = Table("recipe", "before", "after, by seed", "smallest gain", "seconds", "to the required gain")
    figures: dict[str, float] = {}
    for algorithm in only:
        runs = []
        for seed in range(options.seeds):
            runs.append(learned(algorithm, seed))
            last = runs[-1]
            console.print(f"{algorithm} seed={seed}: {last.before:.3f} to {last.after:.3f} in {last.seconds:.0f} s")
        figures[f"gain_{algorithm}"] = gain = min(each.gain for each in runs)
        befores, afters = (", ".join(f"{getattr(each, at):.3f}" for each in runs) for at in ("before", "after"))
        longest, enough = (f"{max(getattr(each, at) for each in runs):.0f}" for at in ("seconds", "enough_s"))
        table.add_row(algorithm, befores, afters, f"{gain:.3f}", longest, enough)
    console.print(table)
    required = {name: required_gain(name.removeprefix("gain_")) for name in figures}
    goals = {name: Goal(f"at least {required[name]}", gain >= required[name]) for name, gain in figures.items()}
    return finish("algorithms", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
