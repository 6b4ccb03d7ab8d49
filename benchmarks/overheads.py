"""Measure what parts of a run besides training cost, as shares of a step of ``grpo_tiny``.

``python -m benchmarks.overheads [--steps N] [--json FILE]``

The parts are the journal of finished responses, the guards against values that are not finite, and the files and output
for people: samples, metrics, TensorBoard and progress. Six equal runs take turns in one process, step by step. In each
step one of them is as usual, three go without one part, one goes without all of them, and one also writes a trace; the
next step deals this out anew. The same step has the same work in all runs, and what the parts cost adds up: least
squares find the costs from the six times of a step. The speed of each run itself, which depends on where its memory
lies, is divided out first: the median of its times, each over the median of its step.

Printed are the medians over all steps with 95% intervals: of CPU time, which the figures are, of wall time, and of
the CPU time inside the part's functions, which varies less and leaves out what it costs elsewhere.

A run in one process waits for no other process, so it has no deadlines. Their cost is measured in one more run, on Ray,
whose steps are made with deadlines and without in turns: the share of the CPU time of all its processes and of Ray's. A
process is asked whether it lives after 5 s of waiting, which no call of this recipe takes.

The benchmark takes about fifteen minutes.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

# Waiting threads of a library would count as work.
os.environ["OMP_NUM_THREADS"] = "1"

import rlflow
from benchmarks.reporting import Goal, finish
from benchmarks.stepped_runs import Seconds, SteppedRun, cpu_seconds_of_all, timed_step
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run

_RECIPE = ("recipe=grpo_tiny", "evaluation=null", "checkpoints.every=100000")
_PARTS = ("journal", "guards", "samples", "trace")
_WARM_UP = 3
# One simulated host: an actor, a reference and an engine, each in a process of its own.
_HOST = "1x3@cpu"
# The parts that a step goes without: none but the trace, each part in turn, all of them, and none.
_VARIANTS = (
    ("trace",),
    *((part, "trace") for part in _PARTS[:-1]),
    _PARTS,
    (),
)
# The columns are the step itself and its parts.
_DESIGN = np.array([[1, *(part not in without for part in _PARTS)] for without in _VARIANTS], float)
_FIGURES = {
    **{part: (part,) for part in _PARTS},
    "journal_and_guards": ("journal", "guards"),
    "total": ("journal", "guards", "samples"),
}
"""The parts that each figure adds up."""
_LIMITS = {"journal": 0.01, "journal_guards_deadlines": 0.02, "samples": 0.01, "trace": 0.03}


def measure(folder: Path, steps: int) -> list[list[Seconds]]:
    """Return the times of each step of each variant."""
    plan = rlflow.compile(rlflow.load(_RECIPE), None)
    runs = [SteppedRun(plan, folder, number, _PARTS) for number in range(len(_VARIANTS))]
    times: list[list[Seconds]] = [[] for _ in _VARIANTS]
    for step in range(steps + _WARM_UP):
        pairs = [(runs[(place + step) % len(runs)], place) for place in range(len(_VARIANTS))]
        # Each variant comes first and last equally often, and before each other one as often as after it.
        first = step // 2 % len(pairs)
        order = [*pairs[first:], *pairs[:first]]
        for run_of_step, place in order if step % 2 else reversed(order):
            times[place].append(run_of_step.step(_VARIANTS[place]))
    for each in runs:
        each.end()
    return [seconds[_WARM_UP:] for seconds in times]


def measure_deadlines(folder: Path, pairs: int) -> list[list[Seconds]]:
    """Return the times of steps on Ray with deadlines, and of as many without. The two take turns."""
    plan = rlflow.compile(rlflow.load([*_RECIPE, f"steps={2 * (pairs + _WARM_UP) + 1}"]), _HOST)
    times: list[list[Seconds]] = [[], []]
    steps = _alternate(times, pairs + _WARM_UP)
    run(plan, folder, RayRuntime(), stop=lambda: next(steps))
    return [seconds[_WARM_UP:] for seconds in times]


def _alternate(times: Sequence[list[Seconds]], pairs: int) -> Iterator[bool]:
    """Yield between the steps of a run whether it is over. Add the times of its steps with deadlines and without."""
    for pair in range(pairs):
        for place in (0, 1) if pair % 2 else (1, 0):
            with timed_step(0, ["deadlines"], ["deadlines"] if place else [], cpu_seconds_of_all) as done:
                yield False
            times[place] += done
    yield True


def shares_of(times: Sequence[Sequence[Seconds]], clock: str) -> dict[str, NDArray[np.float64]]:
    """Return each part's share of each step with all parts but the trace."""
    seconds = np.array([[getattr(each, clock) for each in steps] for steps in times])
    runs = np.array([[each.run for each in steps] for steps in times])
    relative = seconds / np.median(seconds, axis=0)
    for run_number in range(len(times)):
        seconds[runs == run_number] /= np.median(relative[runs == run_number])
    bare, *costs = np.linalg.lstsq(_DESIGN, seconds, rcond=None)[0]
    usual = bare + sum(costs[:-1])
    return {part: cost / usual for part, cost in zip(_PARTS, costs, strict=True)}


def deadline_shares(times: Sequence[Sequence[Seconds]], clock: str) -> NDArray[np.float64]:
    """Return the share of deadlines in each step with them, compared with the step beside it."""
    usual, bare = np.array([[getattr(each, clock) for each in steps] for steps in times])
    shares: NDArray[np.float64] = 1 - bare / usual
    return shares


def shares_inside(times: Sequence[Sequence[Seconds]]) -> dict[str, NDArray[np.float64]]:
    """Return the shares of each step that are spent inside the functions of the parts, from the steps with a trace."""
    return {part: np.array([each.inside[part] / each.cpu for each in times[-1]]) for part in _PARTS}


def median(shares: NDArray[np.float64]) -> tuple[float, str]:
    """Return the median, and a text with its 95% interval, whose ends are two of the values."""
    ordered, spread = np.sort(shares), 0.98 * np.sqrt(len(shares))
    low, high = (int(np.clip(len(shares) / 2 + side * spread, 0, len(shares) - 1)) for side in (-1, 1))
    middle = float(np.median(ordered))
    return middle, f"{middle:6.2%} ({ordered[low]:.2%} to {ordered[high]:.2%})"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overheads")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rlflow-overheads-") as temporary:
        folder = Path(temporary)
        # This also makes the model that the runs start from, where no run on this machine has.
        run(rlflow.compile(rlflow.load([*_RECIPE, "steps=1"]), None), folder / "first", LocalRuntime())
        times = measure(folder, options.steps)
        on_ray = measure_deadlines(folder / "ray", options.steps)
    figures: dict[str, float | bool] = {}

    def note(name: str, *shares: NDArray[np.float64]) -> None:
        """Print the shares of CPU time, of wall time, and of CPU time inside the functions; the first is a figure."""
        (figures[f"{name}_share"], cpu_text), (_, wall_text), (inside, inside_text) = map(median, shares)
        figures[f"{name}_inside"] = inside
        print(f"{name:18} CPU {cpu_text}, wall {wall_text}, inside {inside_text}")

    print(f"a step takes {np.median([each.wall for each in times[0]]):.3f} s, over {len(times[0])} steps")
    clocks = (shares_of(times, "cpu"), shares_of(times, "wall"), shares_inside(times))
    for name, parts in _FIGURES.items():
        note(name, *(np.sum([shares[part] for part in parts], axis=0) for shares in clocks))
    print(f"a step on Ray takes {np.median([each.wall for each in on_ray[0]]):.3f} s, over {len(on_ray[0])} pairs")
    inside = np.array([each.inside["deadlines"] / each.cpu for each in on_ray[0]])
    note("deadlines", deadline_shares(on_ray, "cpu"), deadline_shares(on_ray, "wall"), inside)
    # A difference of noisy times may be negative, but no part has a negative cost.
    costs = (figures["journal_and_guards_share"], figures["deadlines_share"])
    figures["journal_guards_deadlines_share"] = sum(max(0.0, cost) for cost in costs)
    goals = {name: Goal("no goal", True) for name in figures} | {
        f"{name}_share": Goal(f"at most {limit:g}", figures[f"{name}_share"] <= limit)
        for name, limit in _LIMITS.items()
    }
    return finish("overheads", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
