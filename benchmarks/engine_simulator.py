"""A discrete-event simulation of engines that generate, with decoding times from the planner.

A step generates one token of every running sequence. Between two changes of the running set, one formula gives the time
of all steps. An engine admits queued samples as vLLM does: while it has a free slot and its KV cache has room for the
prompt. When the cache is full, it preempts the youngest sequence and prefills it again later.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.resources.time.decoder import Decoder
from rlflow.runtime.generation.engine_state import Capacity

# The time of a message to an engine and back.
_MESSAGE_S = 0.005
# The simulated engine, like a real one, reports samples when they fill a share of its slots or a second has passed.
_SHARE, _LATEST_S = 32, 1.0


class Source(Protocol):
    """The protocol of a scheduler, such as ``rlflow.runtime.generation.scheduler.Scheduler``."""

    def assign(self) -> Mapping[int, list[int]]: ...

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None: ...

    def preempt(self, rank: int) -> tuple[int, list[int]]: ...

    def preempted(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Samples:
    prompts: NDArray[np.int64]
    """[R] tokens of the prompts."""
    lengths: NDArray[np.int64]
    """[R] tokens of the responses."""
    groups: NDArray[np.int64]
    """[R] number of each sample's group."""


@dataclass(frozen=True)
class Speed:
    decoder: Decoder
    prefill: Callable[[float], float]
    """Returns the seconds of a prefill of that many tokens."""


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Seconds until the last sample is complete."""
    preemptions: int
    """Samples that engines preempted on their own."""
    put_off: int
    """Samples that the scheduler preempted or migrated."""
    kept: list[int]
    """The rows in the order of their completion."""
    idle: float
    """The share of all engines' time in which they had nothing to generate."""
    cache: float
    """The share of the KV cache in use, averaged over the time in which engines generate."""


class Engine:
    """A simulated engine, whose clock is at the end of its last step."""

    def __init__(self, samples: Samples, speed: Speed, room: Capacity) -> None:
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
        """Add samples, with the tokens that each has so far, after the step that is running at time ``at``."""
        self.run_to(at)
        if not self._running:
            self.time = max(self.time, at)
        self._waiting.extend(zip(rows, written, strict=True))
        self._admit()

    def put_off(self, rows: Sequence[int], at: float) -> dict[int, int]:
        """Stop the rows that are unfinished at time ``at``, and return the tokens that each has so far."""
        self.run_to(at)
        written = {row: tokens for row, tokens in self._waiting if row in rows}
        for row in self._running.keys() & set(rows):
            written[row] = self._stop(row)
        self._waiting = deque(each for each in self._waiting if each[0] not in written)
        self._admit()
        return written

    def next_end(self) -> float | None:
        """Return when the next sample will be complete if nothing else changes."""
        return self.time + self._seconds(self._steps_to_change()) if self._running else None

    def run_to(self, at: float) -> None:
        """Run all steps that start before ``at``."""
        while self._running and self.time < at:
            most = self._steps_to_change()
            count = min(most, self._steps_in(at - self.time))
            self._step(count)
            if count == most:
                self._change()

    def run_on(self) -> None:
        """Run until the set of running sequences changes."""
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
        """Stop a row and return the tokens that it has so far."""
        start = self._running.pop(row)
        self._base -= int(self._samples.prompts[row]) - start
        self._ends.remove((start + int(self._samples.lengths[row]), row))
        heapq.heapify(self._ends)
        return self.steps - start

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
            start = self.steps - written
            self._running[row] = start
            self._base += prompt - start
            heapq.heappush(self._ends, (start + int(self._samples.lengths[row]), row))


def simulate(samples: Samples, speed: Speed, room: Capacity, num_engines: int, source: Source) -> Outcome:
    """Simulate a step; engines report to the source when they finish samples, and every second."""
    engines = [Engine(samples, speed, room) for _ in range(num_engines)]
    written, told, last = [0] * len(samples.lengths), [0] * num_engines, [0.0] * num_engines
    enough = max(1, room.sequences // _SHARE)
    events: list[tuple[float, int, bool]] = []
    num_put_off = 0

    def expect(rank: int) -> None:
        if (end := engines[rank].next_end()) is not None:
            heapq.heappush(events, (end, rank, False))

    def begin(at: float) -> None:
        for rank, rows in source.assign().items():
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
                continue  # it has reported since
            engine.run_to(time)
        elif (end := engine.next_end()) is None or abs(end - time) > 1e-9:
            continue  # the running set has changed since
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
            of, rows = source.preempt(rank)
            if rows:
                found = engines[of].put_off(rows, now + _MESSAGE_S)
                for row, tokens in found.items():
                    written[row] = tokens
                source.preempted(of, list(found), list(found.values()))
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
