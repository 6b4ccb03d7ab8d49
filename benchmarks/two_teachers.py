"""Distill two teachers, each of which knows one half of a task, and compare with either of them alone.

``python -m benchmarks.two_teachers [--seeds N] [--json FILE]``

A beginner that adds numbers with one digit learns from examples to add numbers with two digits, which is one teacher,
or with three, which is the other. Students start from the same beginner, and are trained on the likeliest words of both
teachers, each for its own sums, or of one teacher for all sums. The score is the exact match on held-out sums, half of
them with two digits and half with three.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.algorithms import Watch
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.recipe import Model, Recipe
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

# The digits of the sums that a teacher learns, and the steps that it takes.
TEACHERS = {"two": (2, 200), "three": (3, 600)}
CASES = {"both": ("two", "three"), "two": ("two",), "three": ("three",)}
# A step has as many examples as one of a teacher, and the same learning rate.
_AS_A_TEACHER = (
    *("steps=250", "graph.rollouts.group_size=1", "graph.update.num_minibatches=1"),
    *("roles.actor.optimizer.learning_rate=1.0e-3", "evaluation.every=50"),
)
_BEGINNER = "{recipe: beginner_mixed_tiny, dtype: float32}"


def sums(*digits: int) -> list[str]:
    """Return the overrides that make a recipe's data sums of two numbers with so many digits."""
    return ["data=mixed_additions", f"data.options.digits={list(digits)}"]


def teacher(name: str) -> Recipe:
    """Return the recipe of a teacher: it continues the training of the beginner."""
    digits, steps = TEACHERS[name]
    recipe = rlflow.load(["recipe=beginner_mixed_tiny", f"name=teacher_{name}", f"steps={steps}", *sums(digits)])
    beginner = Model(recipe=rlflow.load(["recipe=beginner_mixed_tiny"]), dtype="float32")
    return replace(recipe, models={"policy": beginner})


def plan_of(case: str, seed: int = 0) -> Plan:
    """Return the plan of a student. Two teachers are a chain, each for its own sums."""
    names = CASES[case]
    overrides = ["recipe=distill_top_tiny", f"name=taught_by_{case}", f"seed={seed}", *sums(2, 3)]
    overrides += [f"models.policy={_BEGINNER}", "graph.rollouts.max_tokens=6", *_AS_A_TEACHER]
    overrides += ["~models.teacher", "~roles.teacher", "~graph.teacher", f"+graph.update.teacher={names[-1]}"]
    for name in names:
        rows = f"{{digits: '{TEACHERS[name][0]}'}}" if len(names) > 1 else "{}"
        overrides += [
            f"+models.{name}={_BEGINNER}",
            f"+roles.{name}={{model: {name}, engine: transformers}}",
            f"+graph.{name}={{node: top_logprobs, role: {name}, rows: {rows}}}",
        ]
    if len(names) > 1:
        overrides.append(f"+graph.{names[1]}.others={names[0]}")
    recipe = rlflow.load(overrides)
    teachers = {name: replace(recipe.models[name], recipe=teacher(name)) for name in names}
    return rlflow.compile(replace(recipe, models={**recipe.models, **teachers}), "local")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with one seed."""
    yield from map(plan_of, CASES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console, table = Console(), Table("seed", "before", *CASES)
    gains = []
    for seed in range(options.seeds):
        after = {}
        for case in CASES:
            watch = Watch()
            with tempfile.TemporaryDirectory() as folder:
                run(plan_of(case, seed), Path(folder) / "run", LocalRuntime(), [watch])
            scores = [score for _, score in watch.evaluations]
            console.print(f"{case} seed={seed}: {', '.join(f'{score:.3f}' for score in scores)}")
            after[case] = scores[-1]
        table.add_row(str(seed), f"{scores[0]:.3f}", *(f"{score:.3f}" for score in after.values()))
        gains.append(after["both"] - max(after["two"], after["three"]))
    console.print(table)
    figures = {"better_than_either": min(gains)}
    return finish("two_teachers", figures, {"better_than_either": Goal("at least 0", min(gains) >= 0)}, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
