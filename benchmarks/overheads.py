"""Measure what parts of a run besides training cost, as shares of a step of ``grpo_tiny``.

``python -m benchmarks.overheads [--steps N] [--json FILE]``

The parts are the journal of finished responses, the guards against values that are not finite, and the files and output
for people: samples, metrics, TensorBoard and progress. Six equal runs take turns in one process, step by step. In each
step one of them is as usual, three go without one part, one goes without all of them, and one also writes a trace; the
next step deals this out anew. The same step has the same work in all runs, and what the parts cost adds up: least
squares find the costs from the six times of a step. The speed of each run itself, which depends on where its memory
lies, is divided out first: the median of its times, each over the median of its step.

Printed are the medians over all steps with 95% intervals: of CPU time, which the figures are, of wall time, and of
the CPU time inside the part's functions, which varies less and leaves out what it costs elsewhere. A run in one process
waits for no other process, so it has no deadlines. Takes about ten minutes.
"""

import argparse
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter, process_time, thread_time
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

# Waiting threads of a library would count as work.
os.environ["OMP_NUM_THREADS"] = "1"

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.engines.journal import RecordedResponses
from rlflow.report.progress import displays, recorders
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

_PARTS = ("journal", "guards", "samples", "trace")
_WARM_UP = 3
_NOTHING_RECORDED = RecordedResponses(None, {})  # type: ignore[arg-type]
_STAND_INS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "journal": {
        "rlflow.engines.journal.Journal.add": lambda *_: None,
        "rlflow.engines.journal.Journal.recorded": lambda *_: _NOTHING_RECORDED,
    },
    "guards": {
        "rlflow.runtime.step.check_values": lambda *_: None,
        "rlflow.runtime.step.check_advantages": lambda *_: None,
        "rlflow.engines.torch.check_finite": lambda *_: None,
        "rlflow.engines.causal_lm.totals._count_not_finite": lambda _: [],
    },
    "samples": {
        "rlflow.runtime.samples.SampleReader.read": lambda *_: [],
        "rlflow.runtime.observers.Observers.stepped": lambda *_: None,
        "rlflow.runtime.observers.Observers.sampled": lambda *_: None,
        "rlflow.runtime.observers.Observers.failed": lambda *_: None,
    },
    "trace": {
        "rlflow.engines.times.Times.add": lambda *_: None,
        "rlflow.runtime.trace.TraceWriter.stepped": lambda *_: None,
    },
}
"""The stand-ins that replace each part for the time of a step."""
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


@dataclass(frozen=True)
class Seconds:
    """The time of one step of one of the runs."""

    run: int
    cpu: float
    wall: float
    inside: Mapping[str, float]
    """The CPU time inside the functions of each part."""


class SteppedRun:
    """A run in a thread that makes a step when it is told to."""

    def __init__(self, plan: Plan, folder: Path, number: int) -> None:
        self._number = number
        self._go, self._waits, self._is_over = Event(), Event(), False
        console = Console(file=(folder / f"{number}.out").open("w"), width=100)
        arguments = (plan, folder / str(number), LocalRuntime(), [*recorders(plan), *displays(console)])
        self._thread = Thread(target=run, args=arguments, kwargs={"stop": self._stop, "trace": True}, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, without: tuple[str, ...]) -> Seconds:
        with stand_ins(without), timed_parts(without) as inside:
            cpu, wall = process_time(), perf_counter()
            self._waits.clear()
            self._go.set()
            self._wait()
            return Seconds(self._number, process_time() - cpu, perf_counter() - wall, inside)

    def end(self) -> None:
        self._is_over = True
        self._go.set()
        self._thread.join()

    def _wait(self) -> None:
        while not self._waits.wait(1.0):
            assert self._thread.is_alive(), "a run has failed"

    def _stop(self) -> bool:
        """Let the other runs make their step; called between two steps."""
        self._waits.set()
        self._go.wait()
        self._go.clear()
        return self._is_over


@contextmanager
def stand_ins(parts: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            for name, function in _STAND_INS[part].items():
                stack.enter_context(patch(name, function))
        yield


@contextmanager
def timed_parts(without: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Yield the CPU time inside the functions of each part that the step has, which grows as they are called."""
    inside = {part: 0.0 for part in _PARTS if part not in without}

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = thread_time()
            try:
                return function(*arguments)
            finally:
                inside[part] += thread_time() - start

        return call

    with ExitStack() as stack:
        for part in inside:
            for name in _STAND_INS[part]:
                stack.enter_context(patch(name, timed(pkgutil.resolve_name(name), part)))
        yield inside


def measure(folder: Path, steps: int) -> list[list[Seconds]]:
    """Return the times of each step of each variant."""
    plan = rlflow.compile(rlflow.load(["recipe=grpo_tiny", "evaluation=null", "checkpoints.every=100000"]), None)
    runs = [SteppedRun(plan, folder, number) for number in range(len(_VARIANTS))]
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
        times = measure(Path(temporary), options.steps)
    print(f"a step takes {np.median([each.wall for each in times[0]]):.3f} s, over {len(times[0])} steps")
    cpu, wall, inside = shares_of(times, "cpu"), shares_of(times, "wall"), shares_inside(times)
    figures: dict[str, float | bool] = {}
    for name, parts in _FIGURES.items():
        shares, walls, insides = (sum((each[part] for part in parts), np.zeros(())) for each in (cpu, wall, inside))
        figures[f"{name}_share"], text = median(shares)
        figures[f"{name}_inside"], inside_text = median(insides)
        print(f"{name:18} CPU {text}, wall {median(walls)[1]}, inside {inside_text}")
    goals = {name: Goal("no goal", True) for name in figures} | {
        f"{name}_share": Goal(f"at most {limit:g}", figures[f"{name}_share"] <= limit)
        for name, limit in {"journal": 0.01, "journal_and_guards": 0.02, "samples": 0.01, "trace": 0.03}.items()
    }
    return finish("overheads", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
