"""Compare the planner's predictions for this machine with runs on it.

``python -m benchmarks.own_runs [--quick] [--calibration FILE] [--json FILE]``

Without ``--calibration`` the machine is measured first, as ``rlflow calibrate`` does it. No run of this
benchmark is part of the calibration that predicts it. Three tiny recipes and a model of 57 million parameters then run
with three batch sizes each, in one process and on two simulated hosts. The error of a step is that of the plan against
the median of the steps after the first; the error of memory that of each process at its highest peak. A last table
shows plans for the largest batch that were calibrated by the run with the smallest one (``calibration=RUN_FOLDER``);
it has no part in the figures. Takes 15 to 45 minutes on two cores, and three to ten with ``--quick``.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.commands.calibrate.command import calibrate
from rlflow.commands.calibrate.fit import calibration_of_run
from rlflow.commands.calibrate.probes import ONE_HOST, TWO_HOSTS, Probe, recipe_of, run, write_recipe
from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster

_STEPS = 6
_LOCAL, _HOSTS = ONE_HOST, TWO_HOSTS
_GOALS = {"step_time_error_median": 0.15, "step_time_error_max": 0.35, "memory_error_max": 0.15}


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    cluster: str
    batch: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.cluster.partition('@')[0]}-{self.batch}"


@dataclass(frozen=True)
class Result:
    """The figures of a run's report."""

    case: Case
    folder: Path
    predicted_s: float
    measured_s: float
    memory: dict[str, tuple[float, float]]
    """The highest predicted and measured GiB of each process."""

    @property
    def step_error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def memory_error(self) -> float:
        return max(abs(predicted / measured - 1) for predicted, measured in self.memory.values())


def cases(folder: Path, *, quick: bool) -> Iterator[Case]:
    """Yield the runs. Recipes of the large model are written to ``folder``."""
    sizes = {"grpo_tiny": (64, 128, 256), "ppo_tiny": (128, 256, 512), "sft_tiny": (128, 256, 512), "57m": (2, 4, 8)}
    for cluster in (_LOCAL, _HOSTS):
        for model, batches in sizes.items():
            if quick and cluster == _HOSTS and model != "grpo_tiny":
                continue
            for batch in batches[1:2] if quick else batches:
                arguments = (*_recipe(model, cluster, folder), f"data.batch_size={batch}")
                yield Case(model, cluster, batch, arguments)


def _recipe(model: str, cluster: str, folder: Path) -> tuple[str, ...]:
    on_hosts = cluster == _HOSTS
    if model == "57m":
        probe = Probe(
            name="57m hosts" if on_hosts else "57m",
            hidden_size=768,
            num_layers=6,
            batch_size=4,
            group_size=4,
            max_tokens=16,
            on_hosts=on_hosts,
        )
        return (f"recipe={write_recipe(recipe_of(probe), folder)}",)
    if model == "sft_tiny":
        return (f"recipe={model}", *_without_warmup("actor"), *(("roles.actor.engine=deepspeed",) if on_hosts else ()))
    roles = ("actor", "critic") if model == "ppo_tiny" else ("actor",)
    return (f"recipe={model}{'_cluster' if on_hosts else ''}", *_without_warmup(*roles), "evaluation=null")


def _without_warmup(*roles: str) -> tuple[str, ...]:
    """Return arguments that leave out the warm-ups of learning rates, which are longer than these runs."""
    return tuple(f"roles.{role}.optimizer.warmup_steps=0" for role in roles)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs, before they are calibrated."""
    for case in cases(folder, quick=False):
        yield rlflow.compile(rlflow.load(case.arguments), case.cluster)


def measure(case: Case, calibration: Path, folder: Path) -> Result:
    """Run a case, and read its report."""
    directory = folder / case.name
    options = (f"cluster={case.cluster}", f"calibration={calibration}", f"steps={_STEPS}")
    run([*case.arguments, *options], directory)
    report = json.loads((directory / "report.json").read_text())
    return Result(
        case,
        directory,
        report["step"]["predicted"],
        report["step"]["measured"],
        {process: _peaks(phases) for process, phases in report["memory"].items()},
    )


def _peaks(phases: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Return the highest predicted and measured GiB of a process."""

    def highest(which: str) -> float:
        return max(pair[which] or 0.0 for pair in phases.values())

    return highest("predicted"), highest("measured")


def print_result(result: Result) -> None:
    memory = ", ".join(f"{name} {a:.2f}/{b:.2f}" for name, (a, b) in result.memory.items())
    print(
        f"{result.case.name:<22} step {result.predicted_s:7.3f} / {result.measured_s:7.3f} s  {result.step_error:5.0%}"
        f"   GiB {memory}  {result.memory_error:.0%}",
        flush=True,
    )


def print_from_runs(results: Sequence[Result]) -> None:
    """Print plans for the largest batch of a model that the run with the smallest one has calibrated."""
    print("\nthe largest batch, predicted from the run with the smallest")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.case.model, result.case.cluster), []).append(result)
    for group in groups.values():
        first, last = group[0], group[-1]
        if first is last:
            continue
        cluster = load_cluster(last.case.cluster)
        calibration = calibration_of_run(first.folder, cluster)
        plan = compile_recipe(rlflow.load(last.case.arguments), cluster, calibration)
        predicted = plan.prediction.step_seconds
        error = predicted / last.measured_s - 1
        print(f"{last.case.name:<22} step {predicted:7.3f} / {last.measured_s:7.3f} s  {abs(error):5.0%}")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.own_runs")
    parser.add_argument("--quick", action="store_true", help="one batch size, and one recipe on simulated hosts")
    parser.add_argument("--calibration", type=Path, help="a file of rlflow calibrate, instead of a new one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rlflow-own-runs-") as temporary:
        folder = Path(temporary)
        calibration = options.calibration
        if calibration is None:
            calibration = folder / "calibration.yaml"
            calibrate(_LOCAL, calibration)
        # Trains the model that the tiny recipes start from, unless it is cached.
        run(["recipe=grpo_tiny", *_without_warmup("actor"), "steps=1", "evaluation=null"], folder / "base")
        results = []
        for case in cases(folder, quick=options.quick):
            results.append(measure(case, calibration.resolve(), folder))
            print_result(results[-1])
        print_from_runs(results)
    figures: dict[str, float | bool] = {
        "step_time_error_median": median(result.step_error for result in results),
        "step_time_error_max": max(result.step_error for result in results),
        "memory_error_max": max(result.memory_error for result in results),
    }
    goals = {name: Goal(f"at most {most:.2f}", figures[name] <= most) for name, most in _GOALS.items()}
    return finish("own_runs", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
