"""Steps of runs with some of their parts or without them, and how long they take."""

import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time, thread_time
from typing import Any
from unittest.mock import patch

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.engines.journal import RecordedResponses
from rlflow.report.observers import displays, recorders
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.cluster.services import Outage
from rlflow.runtime.ray.waits import Wait
from rlflow.runtime.run import run
from rlflow.system.processes import descendants

_NOTHING_RECORDED = RecordedResponses(None, {})  # type: ignore[arg-type]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _same(name: str) -> Callable[..., Any]:
    """Return the function itself, so that it is timed but not replaced."""
    function: Callable[..., Any] = pkgutil.resolve_name(name)
    return function


STAND_INS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "journal": {
        "rlflow.engines.journal.Journal.add": lambda *_: None,
        "rlflow.engines.journal.Journal.recorded": lambda *_: _NOTHING_RECORDED,
    },
    "guards": {
        "rlflow.runtime.step.check_values": lambda *_: None,
        "rlflow.runtime.graph_runner.check_advantages": lambda *_: None,
        "rlflow.engines.trainer.check_finite": lambda *_: None,
        "rlflow.engines.causal_lm.totals._Pass.is_finite": lambda _, total: total.new_ones(()).bool(),
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
    "deadlines": {
        "rlflow.runtime.ray.waits.Waits.of": lambda _, method, *arguments, **options: Wait(method=method),
        "rlflow.runtime.ray.watchdog.Watchdog.watch": lambda *_: None,
        "rlflow.runtime.ray.cluster.services.RayServices.outage": lambda _: Outage(),
        **{
            name: _same(name)
            for name in (
                "rlflow.runtime.ray.watchdog.Watchdog._forget",
                "rlflow.runtime.ray.watchdog._Watched.hear",
                "rlflow.runtime.ray.watchdog._Watched.fault",
                "rlflow.runtime.ray.watchdog._Watched.is_due",
            )
        },
    },
}
"""The stand-ins that replace each part for the time of a step."""


@dataclass(frozen=True)
class Seconds:
    """The time of one step of one of the runs."""

    run: int
    cpu: float
    """The CPU time of all processes of the run."""
    wall: float
    inside: Mapping[str, float]
    """The CPU time inside the functions of each part."""


class SteppedRun:
    """A run in a thread that makes a step when it is told to."""

    def __init__(self, plan: Plan, folder: Path, number: int, parts: Collection[str]) -> None:
        """Start the run, and wait for its first step. Steps may be made without some of ``parts``."""
        self._number, self._parts = number, parts
        self._go, self._waits, self._is_over = Event(), Event(), False
        console = Console(file=(folder / f"{number}.out").open("w"), width=100)
        arguments = (plan, folder / str(number), LocalRuntime(), [*recorders(plan), *displays(console)])
        self._thread = Thread(target=run, args=arguments, kwargs={"stop": self._stop, "trace": True}, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, without: Collection[str]) -> Seconds:
        """Make the next step, without some of the parts."""
        with timed_step(self._number, self._parts, without) as done:
            self._waits.clear()
            self._go.set()
            self._wait()
        return done[0]

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
def timed_step(
    run_number: int,
    parts: Collection[str],
    without: Collection[str],
    cpu_seconds: Callable[[], float] = process_time,
) -> Iterator[list[Seconds]]:
    """Make a step in this block without some of the parts. Its times are added to the yielded list.

    ``cpu_seconds`` returns the CPU time of all processes of the run.
    """
    done: list[Seconds] = []
    with _stand_ins(without), _timed([part for part in parts if part not in without]) as inside:
        cpu, wall = cpu_seconds(), perf_counter()
        yield done
        done.append(Seconds(run_number, cpu_seconds() - cpu, perf_counter() - wall, inside))


@contextmanager
def _stand_ins(parts: Collection[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            for name, function in STAND_INS[part].items():
                stack.enter_context(patch(name, function))
        yield


@contextmanager
def _timed(parts: Collection[str]) -> Iterator[dict[str, float]]:
    """Yield the CPU time inside the functions of each part, which grows as they are called."""
    inside = dict.fromkeys(parts, 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = thread_time()
            try:
                return function(*arguments, **options)
            finally:
                inside[part] += thread_time() - start

        return call

    with ExitStack() as stack:
        for part in parts:
            for name in STAND_INS[part]:
                stack.enter_context(patch(name, timed(pkgutil.resolve_name(name), part)))
        yield inside


def cpu_seconds_of_all() -> float:
    """Return the CPU time of this process and of the processes that it has started, which are counted in 0.01 s."""
    seconds = process_time()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            # User and system time are the 14th and 15th value; the second one, a name, may have spaces.
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            seconds += (int(values[11]) + int(values[12])) / _TICKS_PER_S
    return seconds
