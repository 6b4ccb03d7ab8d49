"""Measure what parts of a run besides training cost, as shares of a step of ``grpo_tiny``.

``python -m benchmarks.overheads [--steps N] [--json FILE]``

The parts are the journal of finished responses, the guards against values that are not finite, and the files and output
for people: samples, metrics, TensorBoard and progress. Six equal runs take turns in one process, step by step. In each
step one of them is as usual, three go without one part, one goes without all of them, and one also writes a trace; the
next step deals this out anew. The same step has the same work in all runs, so the difference between two of them is the
cost of the part. Differences of the runs themselves, such as where their memory lies, cancel out.

Printed are the medians over all steps with 95% intervals: of CPU time, which the figures are, of wall time, and of
the CPU time inside the part's functions, which varies less and leaves out what it costs elsewhere. A run in one process
waits for no other process, so it has no deadlines. Takes about six minutes.
"""

import argparse
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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

_PARTS = ("journal", "guards", "samples")
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
# The parts that a step goes without, by the name of its figures.
_VARIANTS = {
    "usual": ("trace",),
    **{part: (part, "trace") for part in _PARTS},
    "total": (*_PARTS, "trace"),
    "traced": (),
}


@dataclass(frozen=True)
class Seconds:
    """The time of one step."""

    cpu: float
    wall: float
    inside: Mapping[str, float]
    """The CPU time inside the functions of each part."""


class SteppedRun:
    """A run in a thread that makes a step when it is told to."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._go, self._waits, self._is_over = Event(), Event(), False
        console = Console(file=(folder.parent / f"{folder.name}.out").open("w"), width=100)
        arguments = (plan, folder, LocalRuntime(), [*recorders(plan), *displays(console)])
        self._thread = Thread(target=run, args=arguments, kwargs={"stop": self._stop, "trace": True}, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, without: tuple[str, ...]) -> Seconds:
        timing: AbstractContextManager[dict[str, float]] = nullcontext({})
        if not set(without) & set(_PARTS):
            timing = timed_parts()
        with stand_ins(without), timing as inside:
            cpu, wall = process_time(), perf_counter()
            self._waits.clear()
            self._go.set()
            self._wait()
            return Seconds(process_time() - cpu, perf_counter() - wall, inside)

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
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the CPU time inside the functions of each part, which grows as they are called."""
    inside = dict.fromkeys((*_STAND_INS, "total"), 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = thread_time()
            try:
                return function(*arguments)
            finally:
                for name in (part, "total"):
                    inside[name] += thread_time() - start

        return call

    with ExitStack() as stack:
        for part, functions in _STAND_INS.items():
            for name in functions:
                stack.enter_context(patch(name, timed(pkgutil.resolve_name(name), part)))
        yield inside


def measure(folder: Path, steps: int) -> dict[str, list[Seconds]]:
    """Return the times of each step of each variant."""
    plan = rlflow.compile(rlflow.load(["recipe=grpo_tiny", "evaluation=null", "checkpoints.every=100000"]), None)
    runs = [SteppedRun(plan, folder / str(number)) for number in range(len(_VARIANTS))]
    times: dict[str, list[Seconds]] = {name: [] for name in _VARIANTS}
    for step in range(steps + _WARM_UP):
        pairs = [(runs[(place + step) % len(runs)], name) for place, name in enumerate(_VARIANTS)]
        # Each variant comes first and last equally often, and before each other one as often as after it.
        first = step // 2 % len(pairs)
        order = [*pairs[first:], *pairs[:first]]
        for run_of_step, name in order if step % 2 else reversed(order):
            times[name].append(run_of_step.step(_VARIANTS[name]))
    for each in runs:
        each.end()
    return {name: seconds[_WARM_UP:] for name, seconds in times.items()}


def median(shares: NDArray[np.float64]) -> tuple[float, str]:
    """Return the median, and a text with its 95% interval, whose ends are two of the values."""
    ordered, spread = np.sort(shares), 0.98 * np.sqrt(len(shares))
    low, high = (int(np.clip(len(shares) / 2 + side * spread, 0, len(shares) - 1)) for side in (-1, 1))
    middle = float(np.median(ordered))
    return middle, f"{middle:6.2%} ({ordered[low]:.2%} to {ordered[high]:.2%})"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overheads")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rlflow-overheads-") as temporary:
        times = measure(Path(temporary), options.steps)
    usual, traced = times.pop("usual"), times.pop("traced")
    print(f"a step takes {np.median([each.wall for each in usual]):.3f} s, over {len(usual)} steps")
    figures: dict[str, float | bool] = {}
    steps = {name: (usual, without) for name, without in times.items()} | {"trace": (traced, usual)}
    for name, (complete, without) in steps.items():
        cpu, wall = (
            1 - np.array([getattr(each, clock) for each in without]) / [getattr(each, clock) for each in complete]
            for clock in ("cpu", "wall")
        )
        inside = np.array([each.inside[name] / each.cpu for each in complete])
        figures[f"{name}_share"], paired = median(cpu)
        figures[f"{name}_inside"], own = median(inside)
        print(f"{name:8} CPU {paired}, wall {median(wall)[1]}, inside {own}")
    both = figures["journal_share"] + figures["guards_share"]
    goals = {name: Goal("no goal", True) for name in figures} | {
        "journal_share": Goal("at most 0.01", figures["journal_share"] <= 0.01),
        "guards_share": Goal("with the journal at most 0.02", both <= 0.02),
        "samples_share": Goal("at most 0.01", figures["samples_share"] <= 0.01),
        "total_share": Goal("at most 0.03", figures["total_share"] <= 0.03),
        "trace_share": Goal("at most 0.03", figures["trace_share"] <= 0.03),
    }
    return finish("overheads", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
