"""The schedulers that rlflow's is compared with."""

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_simulator import Samples
from rlflow.runtime.generation.engine_state import Capacity

Ints = NDArray[np.int64]


class Dealing(ABC):
    """A scheduler that gives each engine some samples in turn until none has room, and never preempts."""

    def __init__(self, num_engines: int, each: int) -> None:
        """Give each engine ``each`` samples per turn."""
        self._num_engines, self._each = num_engines, each

    @abstractmethod
    def some(self, rank: int, most: int) -> list[int]:
        """Return at most ``most`` rows that this engine has room for."""

    def assign(self) -> dict[int, list[int]]:
        given: dict[int, list[int]] = {}
        open_ranks = list(range(self._num_engines))
        while open_ranks:
            for rank in list(open_ranks):
                rows = self.some(rank, self._each)
                given.setdefault(rank, []).extend(rows)
                if len(rows) < self._each:
                    open_ranks.remove(rank)
        return {rank: rows for rank, rows in given.items() if rows}

    def preempt(self, rank: int) -> tuple[int, list[int]]:
        return rank, []

    def preempted(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        raise AssertionError("this scheduler never preempts")


class Queues(Dealing):
    """A queue of rows for each engine, or one for all; an engine with a free slot takes the next row."""

    def __init__(self, queues: Sequence[Iterable[int]], room: int, each: int) -> None:
        """Allow ``room`` samples per engine at once, and give ``each`` per turn at the start."""
        super().__init__(len(queues), each)
        self._queues = [iter(queue) for queue in queues]
        self._room = room
        self._running = [0] * len(queues)

    def some(self, rank: int, most: int) -> list[int]:
        count = min(self._room - self._running[rank], most)
        rows = [row for _, row in zip(range(count), self._queues[rank], strict=False)]
        self._running[rank] += len(rows)
        return rows

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        self._running[rank] -= len(rows)


def fifo(samples: Samples, room: Capacity, num_engines: int) -> Queues:
    """Return a scheduler that dispatches when an engine is free, in the order of the data."""
    one = iter(range(len(samples.lengths)))
    return Queues([one] * num_engines, room.sequences, 1)


def static(samples: Samples, room: Capacity, num_engines: int) -> Queues:
    """Return a scheduler that gives each engine its share of the prompts at once."""
    size = len(samples.lengths)
    return Queues(np.array_split(np.arange(size), num_engines), size, size)


class Oracle(Dealing):
    """A scheduler that knows all lengths: longest first, and never more in flight than the cache can complete."""

    def __init__(self, samples: Samples, room: Capacity, num_engines: int, *, shards: bool) -> None:
        """Use one queue for all engines, or with ``shards`` one queue each with equally many tokens."""
        super().__init__(num_engines, 1)
        self._samples, self._room = samples, room
        order = np.argsort(-samples.lengths, kind="stable")
        if not shards:
            # Ascending.
            self._queues: list[list[int]] = [order[::-1].tolist()] * num_engines
        else:
            self._queues = [[] for _ in range(num_engines)]
            loads = np.zeros(num_engines)
            for row in order:
                rank = int(loads.argmin())
                loads[rank] += samples.lengths[row] + samples.prompts[row]
                self._queues[rank].insert(0, int(row))
        self._running: list[dict[int, int]] = [{} for _ in range(num_engines)]
        self._steps = [0] * num_engines

    def some(self, rank: int, most: int) -> list[int]:
        queue, running, rows = self._queues[rank], self._running[rank], list[int]()
        while queue and len(running) < self._room.sequences and len(rows) < most:
            now = self._steps[rank]
            held, starts = list(running), [*running.values(), now]
            # The longest row that fits; shorter rows fit too.
            place = bisect(range(len(queue)), 0, key=lambda place: not self._fits([*held, queue[place]], starts, now))
            if place == 0:
                break
            row = queue.pop(place - 1)
            rows.append(row)
            running[row] = now
        return rows

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        self._steps[rank] = steps
        for row in rows:
            del self._running[rank][row]

    def _fits(self, rows: Sequence[int], starts: Sequence[int], now: int) -> bool:
        """Return whether the cache has room for all of the rows until each is complete."""
        samples = self._samples
        written = now - np.array(starts)
        left = samples.lengths[rows] - written
        held = samples.prompts[rows] + written
        order = np.argsort(-left)
        count = np.arange(1, len(rows) + 1)
        return bool((np.cumsum(held[order]) + count * left[order]).max() + len(rows) <= self._room.tokens)
