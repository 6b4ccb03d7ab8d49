"""Engines that write, as events: a step writes a token of every running sequence, in the planner's seconds.

Between two changes of what runs, the time of all steps follows from one formula. An engine admits what waits as vLLM
does, while it has a place and its cache has room for the prompt, and puts the youngest off when the cache is full, to
read it again later.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.resources.time.decoding import Decoder
from rlflow.runtime.generation.scheduler import Room

# Of a message to an engine and back.
_MESSAGE_S = 0.005
# As in the real loop: an engine tells of what it has finished when that is a share of its places, or after a second.
_SHARE, _LATEST_S = 32, 1.0


class Source(Protocol):
    """Who gives the samples out. ``rlflow.runtime.generation.scheduler.Scheduler`` is one."""

    def begin(self) -> Mapping[int, list[int]]: ...

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None: ...

    def put_off(self, rank: int) -> tuple[int, list[int]]: ...

    def returned(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Samples:
    prompts: NDArray[np.int64]
    """[R] tokens."""
    lengths: NDArray[np.int64]
    """[R] tokens of the responses."""
    groups: NDArray[np.int64]
    """[R]"""


@dataclass(frozen=True)
class Speed:
    decoder: Decoder
    prefill: Callable[[float], float]
    """Seconds of reading so many tokens."""


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Until the last sample is done."""
    preemptions: int
    """Samples that engines have put off of their own accord."""
    put_off: int
    """And that they have been told to."""
    kept: list[int]
    """The rows in the order in which they were done."""
    idle: float
    """Of all engines' time, the share in which they had nothing to write."""
    cache: float
    """Of the cache, the share that is held, on average over the engines' time of writing."""


class Engine:
    """Its clock stands at the end of the last step."""

    def __init__(self, samples: Samples, speed: Speed, room: Room) -> None:
        self._samples, self._speed, self._room = samples, speed, room
        self.time, self.busy, self.held = 0.0, 0.0, 0.0
        self.steps = 0
        self.done: list[int] = []
        self.preemptions = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._ends: list[tuple[int, int]] = []
        self._running: dict[int, int] = {}
        self._base = 0
        self._read: set[int] = set()

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def give(self, rows: Sequence[int], written: Sequence[int], at: float) -> None:
        """They come while a step runs: it is ended first. ``written``: tokens of each so far."""
        self.run_to(at)
        if not self._running:
            self.time = max(self.time, at)
        self._waiting.extend(zip(rows, written, strict=True))
        self._admit()

    def put_off(self, rows: Sequence[int], at: float) -> dict[int, int]:
        """Those of the rows that are not done by then are written no further: their tokens so far."""
        self.run_to(at)
        written = {row: tokens for row, tokens in self._waiting if row in rows}
        for row in self._running.keys() & set(rows):
            written[row] = self._stop(row)
        self._waiting = deque(each for each in self._waiting if each[0] not in written)
        self._admit()
        return written

    def next_end(self) -> float | None:
        """When the next sample is done, if nothing changes before."""
        return self.time + self._seconds(self._steps_to_change()) if self._running else None

    def run_to(self, at: float) -> None:
        """All steps that begin before ``at``."""
        while self._running and self.time < at:
            most = self._steps_to_change()
            count = min(most, self._steps_in(at - self.time))
            self._step(count)
            if count == most:
                self._change()

    def run_on(self) -> None:
        """Until the next change."""
        self._step(self._steps_to_change())
        self._change()

    def _context(self) -> int:
        return self._base + len(self._running) * self.steps

    def _steps_to_change(self) -> int:
        full = (self._room.tokens - self._context()) // len(self._running) + 1
        return max(1, min(self._ends[0][0] - self.steps, full))

    def _seconds(self, count: int) -> float:
        active = len(self._running)
        return count * self._speed.decoder.seconds(active, self._context() / active + (count + 1) / 2)

    def _steps_in(self, seconds: float) -> int:
        growth = (self._seconds(3) - 3 * self._seconds(1)) / 6
        linear = self._seconds(1) - growth
        if growth * seconds < 1e-12 * linear**2:
            return max(1, ceil(seconds / linear - 1e-9))
        return max(1, ceil((sqrt(linear**2 + 4 * growth * seconds) - linear) / (2 * growth) - 1e-9))

    def _step(self, count: int) -> None:
        seconds = self._seconds(count)
        self.time += seconds
        self.busy += seconds
        self.held += seconds * (self._context() + len(self._running) * count / 2)
        self.steps += count

    def _change(self) -> None:
        while self._ends and self._ends[0][0] <= self.steps:
            row = heapq.heappop(self._ends)[1]
            self._base -= int(self._samples.prompts[row]) - self._running.pop(row)
            self.done.append(row)
        while self._running and self._context() > self._room.tokens:
            row = next(reversed(self._running))
            self._waiting.appendleft((row, self._stop(row)))
            self.preemptions += 1
        self._admit()

    def _stop(self, row: int) -> int:
        """Its tokens so far."""
        begun = self._running.pop(row)
        self._base -= int(self._samples.prompts[row]) - begun
        self._ends.remove((begun + int(self._samples.lengths[row]), row))
        heapq.heapify(self._ends)
        return self.steps - begun

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._room.sequences:
            row, written = self._waiting[0]
            prompt = int(self._samples.prompts[row])
            if self._context() + prompt + written + len(self._running) + 1 > self._room.tokens:
                return
            self._waiting.popleft()
            group = int(self._samples.groups[row])
            if written or group not in self._read:
                seconds = self._speed.prefill(prompt + written)
                self.time += seconds
                self.busy += seconds
                self._read.add(group)
            begun = self.steps - written
            self._running[row] = begun
            self._base += prompt - begun
            heapq.heappush(self._ends, (begun + int(self._samples.lengths[row]), row))


def simulate(samples: Samples, speed: Speed, room: Room, num_engines: int, source: Source) -> Outcome:
    """An engine tells of itself when it has news, and each second."""
    engines = [Engine(samples, speed, room) for _ in range(num_engines)]
    written, told, last = [0] * len(samples.lengths), [0] * num_engines, [0.0] * num_engines
    enough = max(1, room.sequences // _SHARE)
    events: list[tuple[float, int, bool]] = []
    num_put_off = 0

    def expect(rank: int) -> None:
        if (end := engines[rank].next_end()) is not None:
            heapq.heappush(events, (end, rank, False))

    def begin(at: float) -> None:
        for rank, rows in source.begin().items():
            if not engines[rank].load:
                last[rank] = at
                heapq.heappush(events, (at + _LATEST_S, rank, True))
            engines[rank].give(rows, [written[row] for row in rows], at)
            expect(rank)

    begin(0.0)
    while events:
        time, rank, is_timer = heapq.heappop(events)
        engine = engines[rank]
        if is_timer:
            if time < last[rank] + _LATEST_S or not engine.load:
                continue  # it has told of itself since
            engine.run_to(time)
        elif (end := engine.next_end()) is None or abs(end - time) > 1e-9:
            continue  # what ran has changed since
        else:
            engine.run_on()
        news = len(engine.done) - told[rank]
        if is_timer or news >= enough or (news and not engine.load):
            rows = engine.done[told[rank] :]
            told[rank] = len(engine.done)
            source.finished(rank, rows, samples.lengths[rows].tolist(), engine.steps)
            now = max(time, engine.time)
            last[rank] = now
            heapq.heappush(events, (now + _LATEST_S, rank, True))
            of, rows = source.put_off(rank)
            if rows:
                found = engines[of].put_off(rows, now + _MESSAGE_S)
                for row, tokens in found.items():
                    written[row] = tokens
                source.returned(of, list(found), list(found.values()))
                num_put_off += len(found)
                expect(of)
                now += _MESSAGE_S
            begin(now + _MESSAGE_S)
        expect(rank)
    seconds = max(engine.time for engine in engines)
    busy = sum(engine.busy for engine in engines)
    return Outcome(
        seconds=seconds,
        preemptions=sum(engine.preemptions for engine in engines),
        put_off=num_put_off,
        kept=[row for engine in engines for row in engine.done],
        idle=1 - busy / (seconds * num_engines),
        cache=sum(engine.held for engine in engines) / (busy * room.tokens),
    )
