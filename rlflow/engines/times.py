"""The times at which methods, nodes and operations of torch ran, for traces of a run."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.memory import wrap_calls


@dataclass(frozen=True)
class Span:
    """A time in which something ran, in nanoseconds since 1970 by the clock of its host."""

    name: str
    start: int
    end: int


class Times:
    """Spans since they were last taken. Any thread may add some."""

    def __init__(self, engine: object = None) -> None:
        """Record each call of the ``engine``, if there is one, from now on."""
        self._spans: list[Span] = []
        wrap_calls(engine, self._during)

    def add(self, name: str, start: float, end: float) -> None:
        """Add a span from its ends in seconds of ``time.perf_counter``."""
        offset = time.time_ns() - time.perf_counter_ns()
        self._spans.append(Span(name, offset + round(1e9 * start), offset + round(1e9 * end)))

    def take(self) -> list[Span]:
        """Return the spans that were added since the last time."""
        taken = list(self._spans)
        del self._spans[: len(taken)]
        return taken

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter())


def record_each(engines: Mapping[str, object]) -> Callable[[], dict[str, list[Span]]]:
    """Record the calls of engines; return a function that takes those since the last time, by the engines' names."""
    times = {name: Times(engine) for name, engine in engines.items()}
    return lambda: {name: spans.take() for name, spans in times.items()}


class _NoTimes(Times):
    """The times of a run that is not traced, which are not recorded."""

    def add(self, name: str, start: float, end: float) -> None:
        pass


UNTRACED = _NoTimes()
"""Takes times, and forgets them."""


class ProfiledEngine:
    """A base class for engines that call torch in this process, whose operations torch's profiler can record.

    It records the thread that starts it, in which all methods of the engine must run. Several engines in a thread have
    one profile, which the first of them writes.
    """

    _spec: EngineSpec

    def start_profile(self) -> None:
        """Record operations until ``write_profile``. A profile of a step that has failed is discarded."""
        start_profile()

    def write_profile(self, folder: Path) -> None:
        """Write a trace of the recorded operations to a file, which is named after the role and the rank."""
        write_profile(folder, f"{self._spec.role}-{self._spec.rank}")


_profiles: list[Any] = []
"""The torch.profiler.profile that is recording in this process, if there is one."""


def start_profile() -> None:
    """Record the operations of torch in this thread until ``write_profile``, and discard what was recorded before."""
    from torch.profiler import profile

    while _profiles:
        _profiles.pop().stop()
    _profiles.append(profile())
    _profiles[0].start()


def write_profile(folder: Path, name: str) -> None:
    """Write a trace of the operations that were recorded in this process, unless they have been written."""
    if not _profiles:
        return
    profile = _profiles.pop()
    profile.stop()
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard looks for files with this ending.
    profile.export_chrome_trace(str(folder / f"{name}.pt.trace.json.gz"))
