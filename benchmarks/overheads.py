"""Measure what parts of a run besides training cost, as shares of a step of ``grpo_tiny``.

``python -m benchmarks.overheads [--steps N] [--json FILE]``

The parts are the journal of finished responses, the guards against values that are not finite, and the files and output
for people: samples, metrics, TensorBoard and progress. Six equal runs take turns in one process, step by step. In each
step one of them is as usual, three go without one part, one goes without all of them, and one also writes a trace; the
next step deals this out anew. The same step has the same work in all runs, and each run has a speed of its own, which
depends on where its memory lies. A robust regression finds what remains: the cost of each part.

Printed are the costs with 95% intervals: in CPU time, which the figures are, in wall time, and in CPU time inside the
part's functions, which varies less and leaves out what it costs elsewhere.

A run in one process waits for no other process, so it has no deadlines. Their cost is measured in one more run, on Ray,
whose steps are made with deadlines and without in turns: the share of the CPU time of all its processes and of Ray's. A
process is asked whether it lives after 5 s of waiting, which no call of this recipe takes.

The benchmark takes about twenty minutes.
"""

import argparse
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

# Waiting threads of a library would count as work.
os.environ["OMP_NUM_THREADS"] = "1"

import rlflow
from benchmarks.reporting import Goal, finish
from benchmarks.stepped_runs import Seconds, SteppedRun, cpu_seconds_of_all, timed_step
from rlflow.compiler.plan import Plan
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run

_RECIPE = ("recipe=grpo_tiny", "evaluation=null", "checkpoints.every=100000")
_PARTS = ("journal", "guards", "samples", "trace")
_WARM_UP = 3
# One simulated host: an actor, a reference and an engine, each in a process of its own.
_HOST = "1x3@cpu"
# The parts that a step goes without: none but the trace, each part in turn, all of them, and none.
_VARIANTS: Sequence[Collection[str]] = (
    ("trace",),
    *((part, "trace") for part in _PARTS[:-1]),
    _PARTS,
    (),
)
# The parts that the steps of the run on Ray go without, in turns.
_ON_RAY: Sequence[Collection[str]] = ((), ("deadlines",))
# The parts that each figure adds up.
_FIGURES = {
    **{part: (part,) for part in _PARTS},
    "journal_and_guards": ("journal", "guards"),
    "total": ("journal", "guards", "samples"),
}
_LIMITS = {"journal": 0.01, "journal_guards_deadlines": 0.02, "samples": 0.01, "trace": 0.03}


@dataclass(frozen=True)
class Cost:
    """A share of a step, with its 95% interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:6.2%} ({self.low:.2%} to {self.high:.2%})"


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the run in this process and of the run on Ray."""
    yield from (rlflow.compile(rlflow.load(_RECIPE), cluster) for cluster in (None, _HOST))


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
    """Return the times of steps on Ray with deadlines, and of as many without (``_ON_RAY``). The two take turns."""
    plan = rlflow.compile(rlflow.load([*_RECIPE, f"steps={2 * (pairs + _WARM_UP) + 1}"]), _HOST)
    times: list[list[Seconds]] = [[], []]
    steps = _alternate(times, pairs + _WARM_UP)
    run(plan, folder, RayRuntime(), stop=lambda: next(steps))
    return [seconds[_WARM_UP:] for seconds in times]


def _alternate(times: Sequence[list[Seconds]], pairs: int) -> Iterator[bool]:
    """Yield between the steps of a run whether it is over. Add the times of its steps with deadlines and without."""
    for pair in range(pairs):
        for place in (0, 1) if pair % 2 else (1, 0):
            with timed_step(0, ["deadlines"], _ON_RAY[place], cpu_seconds_of_all) as done:
                yield False
            times[place] += done
    yield True


def compare(
    times: Sequence[Sequence[Seconds]], clock: str, variants: Sequence[Collection[str]], parts: Collection[str]
) -> Cost:
    """Return the cost of parts together, from the times of steps [variants][steps] that go without some parts.

    The logarithm of a time is a sum: of its step, its run, and each part that the step goes without. Tukey's weights
    leave out the times of interruptions.
    """
    from statsmodels.robust.norms import TukeyBiweight
    from statsmodels.robust.robust_linear_model import RLM

    seconds = np.array([[getattr(each, clock) for each in steps] for steps in times])
    runs = np.array([each.run for steps in times for each in steps])
    num_variants, num_steps = seconds.shape
    compared = sorted({part for without in variants for part in without})
    left_out = np.array([[part in without for part in compared] for without in variants], float)
    columns = (
        np.repeat(-left_out, num_steps, axis=0),
        np.tile(np.eye(num_steps), (num_variants, 1)),
        np.eye(runs.max() + 1)[runs][:, 1:],  # the first run is the measure of the others
    )
    fit = RLM(np.log(seconds).ravel(), np.hstack(columns), TukeyBiweight()).fit()
    counted = np.zeros(len(fit.params))
    counted[[compared.index(part) for part in parts]] = 1
    test = fit.t_test(counted)
    return Cost(float(test.effect[0]), *map(float, test.conf_int()[0]))


def share_inside(times: Sequence[Seconds], parts: Collection[str]) -> Cost:
    """Return the share of a step that is spent inside the functions of parts: the median over all steps."""
    shares = np.sort([sum(each.inside[part] for part in parts) / each.cpu for each in times])
    # The ends of a median's interval are two of the values.
    spread = 0.98 * np.sqrt(len(shares))
    low, high = (int(np.clip(len(shares) / 2 + side * spread, 0, len(shares) - 1)) for side in (-1, 1))
    return Cost(float(np.median(shares)), float(shares[low]), float(shares[high]))


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overheads")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rlflow-overheads-") as temporary:
        folder = Path(temporary)
        # This also makes the model that the runs start from, where no run on this machine has.
        run(rlflow.compile(rlflow.load([*_RECIPE, "steps=10"]), None), folder / "first", LocalRuntime())
        times = measure(folder, options.steps)
        on_ray = measure_deadlines(folder / "ray", options.steps)
    figures: dict[str, float | bool] = {}

    def note(
        name: str, times: list[list[Seconds]], variants: Sequence[Collection[str]], parts: Collection[str]
    ) -> None:
        """Print the cost of parts in CPU time, in wall time, and inside their functions."""
        cpu, wall = (compare(times, clock, variants, parts) for clock in ("cpu", "wall"))
        with_all = next(steps for steps, without in zip(times, variants, strict=True) if not without)
        inside = share_inside(with_all, parts)
        figures[f"{name}_share"], figures[f"{name}_inside"] = cpu.share, inside.share
        print(f"{name:18} CPU {cpu}, wall {wall}, inside {inside}")

    print(f"a step takes {np.median([each.wall for each in times[0]]):.3f} s, over {len(times[0])} steps")
    for name, parts in _FIGURES.items():
        note(name, times, _VARIANTS, parts)
    print(f"a step on Ray takes {np.median([each.wall for each in on_ray[0]]):.3f} s, over {len(on_ray[0])} pairs")
    note("deadlines", on_ray, _ON_RAY, ["deadlines"])
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
