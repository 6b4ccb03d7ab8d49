"""Who gives samples to engines, besides rlflow's scheduler: what it is compared with."""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine_simulator import Samples
from rlflow.runtime.rollout.expectation import Expectation
from rlflow.runtime.rollout.scheduling import Room, Scheduler

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def dealt(source: "Queues | Oracle", num_engines: int, each: int) -> dict[int, list[int]]:
    """The first samples of all engines, in turn until none has room."""
    given: dict[int, list[int]] = {rank: [] for rank in range(num_engines)}
    open_ranks = list(given)
    while open_ranks:
        for rank in list(open_ranks):
            rows = source.some(rank, each)
            given[rank] += rows
            if len(rows) < each:
                open_ranks.remove(rank)
    return given


class Queues:
    """An order of rows for each engine, or one for all; an engine with a place takes the next."""

    def __init__(self, queues: Sequence[Iterable[int]], room: int, each: int) -> None:
        """``room``: samples that an engine has at once; ``each``: those that it is first given in a turn."""
        self._each = each
        self._queues = [iter(queue) for queue in queues]
        self._room = room
        self._running = [0] * len(queues)

    def deal(self) -> dict[int, list[int]]:
        return dealt(self, len(self._queues), self._each)

    def next(self, rank: int) -> dict[int, list[int]]:
        return {rank: rows} if (rows := self.some(rank)) else {}

    def some(self, rank: int, most: int | None = None) -> list[int]:
        places = self._room - self._running[rank]
        count = places if most is None else min(places, most)
        rows = [row for _, row in zip(range(count), self._queues[rank], strict=False)]
        self._running[rank] += len(rows)
        return rows

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        self._running[rank] -= len(rows)


def fifo(samples: Samples, room: Room, num_engines: int) -> Queues:
    """Pull when free, in the order of the data."""
    one = iter(range(len(samples.lengths)))
    return Queues([one] * num_engines, room.sequences, 1)


def static(samples: Samples, room: Room, num_engines: int) -> Queues:
    """Each engine has its part of the prompts, all at once."""
    size = len(samples.lengths)
    return Queues(np.array_split(np.arange(size), num_engines), size, size)


class Oracle:
    """Knows all lengths: longest first, and no more in flight than will fit until each is done."""

    def __init__(self, samples: Samples, room: Room, num_engines: int, *, shards: bool) -> None:
        """``shards``: each engine has samples of as many tokens, instead of taking from one queue."""
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

    def deal(self) -> dict[int, list[int]]:
        return dealt(self, len(self._queues), 1)

    def next(self, rank: int) -> dict[int, list[int]]:
        return {rank: rows} if (rows := self.some(rank)) else {}

    def some(self, rank: int, most: int | None = None) -> list[int]:
        queue, running, rows = self._queues[rank], self._running[rank], list[int]()
        while queue and len(running) < self._room.sequences and (most is None or len(rows) < most):
            now = self._steps[rank]
            held, begun = list(running), [*running.values(), now]
            # The longest that fits: what is shorter fits too.
            place = bisect(range(len(queue)), 0, key=lambda place: not self._fits([*held, queue[place]], begun, now))
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

    def _fits(self, rows: Sequence[int], begun: Sequence[int], now: int) -> bool:
        """Whether the cache holds all of them whenever one ends."""
        samples = self._samples
        written = now - np.array(begun)
        left = samples.lengths[rows] - written
        held = samples.prompts[rows] + written
        order = np.argsort(-left)
        count = np.arange(1, len(rows) + 1)
        return bool((np.cumsum(held[order]) + count * left[order]).max() + len(rows) <= self._room.tokens)


class KnownGroups(Expectation):
    """How the lengths of each group are distributed is known, and of a sample only how far it has come.

    Shapes: R rows, F points in the future, G groups, E edges.
    """

    def __init__(self, groups: Ints, max_tokens: int, surviving: Callable[[Floats], Floats]) -> None:
        """``surviving``: from lengths [E] to the share of each group that is longer, [G, E]."""
        super().__init__(groups, max_tokens)
        self._hazards = -np.log(np.maximum(surviving(self._edges), 1e-12))
        means = (np.exp(-self._hazards[:, :-1]) * np.diff(self._edges)).sum(1)
        self.factors = means.mean() / means

    def learn(self, rows: Ints, tokens: Floats, done: NDArray[np.bool_]) -> None:
        """There is nothing to learn."""

    def _alive(self, rows: Ints, tokens: Floats, left: Ints) -> tuple[Floats, Floats]:
        ahead = np.minimum(self._future, left[:, None])
        groups = self._groups[rows, None]
        return ahead, np.exp(self._at(groups, tokens[:, None]) - self._at(groups, tokens[:, None] + ahead))

    def _at(self, groups: Ints, tokens: Floats) -> Floats:
        after = np.clip(np.searchsorted(self._edges, tokens), 1, len(self._edges) - 1)
        low, high = self._edges[after - 1], self._edges[after]
        share = (tokens - low) / (high - low)
        found: Floats = self._hazards[groups, after - 1] * (1 - share) + self._hazards[groups, after] * share
        return found


class Informed(Scheduler):
    """rlflow's, with the true distribution of each group in the place of what it expects."""

    def __init__(
        self,
        prompt_lengths: Ints,
        group_size: int,
        max_tokens: int,
        rooms: Mapping[int, Room],
        surviving: Callable[[Floats], Floats],
    ) -> None:
        """``surviving`` as of KnownGroups."""
        super().__init__(prompt_lengths, group_size, max_tokens, rooms)
        self._expectation = KnownGroups(self._groups, max_tokens, surviving)
        self._order()
