"""Which sample is written by which engine, and when: pure, without threads and without a clock.

One sample of each group is written first. What these and all others show of a group's length orders the rest: the
longest first, so that short ones fill the end (Graham 1969, LPT). An engine is given samples when it has room for them.

Room is a number of sequences and a number of tokens of keys and values. Of the tokens, as many samples are in flight
as are expected to fit at every moment to come, with some standard deviations to spare. Of a sample nothing is expected
that its limit forbids, nor less than it has written. Of the last samples more are begun: one that begins late costs
more than one that the engine has to put off. An engine puts off those that it was given last, and these are taken to
stand still meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.rollout.expectation import Expectation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The order of those that wait is made anew so often in a step. Each time costs a sort.
_ORDERS = 128
# In so many turns engines are given their first samples.
_TURNS = 16
# How far above the expected use of the cache there must be room, in standard deviations. More leaves room unused, less
# has samples put off (``benchmarks/tail.py``).
DEVIATIONS = 1.5
# Likewise for the last samples of a step: one that begins late costs more than one that is put off.
LAST_DEVIATIONS = 0.5


@dataclass(frozen=True)
class Room:
    """Of one engine."""

    sequences: int
    """Written at once, at most."""
    tokens: int
    """Of keys and values in its cache."""


@dataclass
class _Engine:
    room: Room
    running: dict[int, None] = field(default_factory=dict)
    """Rows, in the order in which they were given to it."""
    ended: list[int] = field(default_factory=list)
    steps: int = 0
    left: float = 0.0
    """Tokens that it was last expected to write still of the rows that it has."""


class Scheduler:
    """Rows are samples: row ``prompt * group_size + sample``. Every row is finished exactly once.

    The same events in the same order lead to the same decisions.
    """

    def __init__(
        self,
        prompt_lengths: Ints,
        group_size: int,
        max_tokens: int,
        rooms: Mapping[int, Room],
        *,
        rows: Ints | None = None,
        before: Floats | None = None,
        written: Ints | None = None,
    ) -> None:
        """``prompt_lengths`` [P] in tokens; ``rows`` are those asked for, by default all.

        ``before``: some lengths of the step before, in tokens. ``written`` [R]: tokens that each row begins with, or,
        where it is not asked for, has ended with; the rows of a prompt of which any has some come before others.
        """
        self._prompts = np.repeat(prompt_lengths, group_size)
        self._groups = np.repeat(np.arange(len(prompt_lengths)), group_size)
        self._max_tokens = max_tokens
        self._engines = {rank: _Engine(room) for rank, room in rooms.items()}
        size = len(self._groups)
        self._before = np.zeros(size, np.int64) if written is None else written
        self._older = np.bincount(self._groups, self._before) > 0
        self._lengths = np.zeros(size, np.int64)
        self._written = self._before.copy()
        self._waiting = np.zeros(size, np.bool_)
        self._waiting[np.arange(size) if rows is None else rows] = True
        self._lengths[~self._waiting] = self._before[~self._waiting]
        self._num_waiting = int(self._waiting.sum())
        self._expectation = Expectation(self._groups, max_tokens, before)
        self._queue: Ints = np.zeros(0, np.int64)
        self._expected: Floats = np.zeros(0)
        self._first = self._last = self._events = 0
        self._every = max(1, self._num_waiting // _ORDERS)
        self._order()

    @property
    def waiting(self) -> int:
        """Rows that no engine has."""
        return self._num_waiting

    @property
    def ranks(self) -> Sequence[int]:
        """The engines that are not lost."""
        return list(self._engines)

    @property
    def all_fit(self) -> bool:
        """Whether all rows that wait can be written at once, however long they become."""
        places = sum(engine.room.sequences for engine in self._engines.values())
        longest = int(self._prompts.max(initial=0)) + self._max_tokens
        each = -(-self._num_waiting // max(1, len(self._engines)))
        return self._num_waiting <= places and all(
            each <= engine.room.sequences and each * longest <= engine.room.tokens for engine in self._engines.values()
        )

    def room(self, rank: int) -> Room:
        return self._engines[rank].room

    def deal(self) -> dict[int, list[int]]:
        """The first rows of all engines, which are given some in turn until none has room."""
        if self._num_waiting and all(map(self._takes_its_share, self._engines.values())):
            queue, count = self._queue[self._first : self._last], len(self._engines)
            parts = {rank: queue[place::count] for place, rank in enumerate(self._engines)}
            for rank, part in parts.items():
                self._begin(self._engines[rank], part)
            self._first = self._last
            return {rank: part.tolist() for rank, part in parts.items()}
        given: dict[int, list[int]] = {rank: [] for rank in self._engines}
        least = min((engine.room.sequences for engine in self._engines.values()), default=0)
        turn = max(1, min(least, self._num_waiting // max(1, len(given))) // _TURNS)
        hungry = list(given)
        while hungry and self._num_waiting:
            front = self._queue[self._first : self._first + turn * len(hungry)]
            left = np.ones(len(front), np.bool_)
            full = []
            for place, rank in enumerate(hungry):
                # What follows each other, of one group or of like ones, goes to different engines.
                engine, part = self._engines[rank], front[place :: len(hungry)]
                part = part[: engine.room.sequences - len(engine.running)]
                part = part[: self._fitting(engine, part, DEVIATIONS)]
                self._begin(engine, part)
                given[rank] += part.tolist()
                left[place : place + len(part) * len(hungry) : len(hungry)] = False
                if len(part) < turn:
                    full.append(rank)
            self._queue = np.concatenate([front[left], self._queue[self._first + len(front) : self._last]])
            self._first, self._last = 0, len(self._queue)
            hungry = [rank for rank in hungry if rank not in full]
        for engine in self._engines.values():
            self._look(engine)
        return given

    def running(self, rank: int) -> int:
        """Rows that this engine is writing."""
        return len(self._engines[rank].running)

    def rows(self, rank: int) -> Sequence[int]:
        """Those that this engine has finished, ascending."""
        return sorted(self._engines[rank].ended)

    def next(self, rank: int) -> dict[int, list[int]]:
        """The rows that this engine, which has told of something, is to begin now, and what another may begin instead
        of it. Engines that begin none are left out."""
        if self._events >= self._every:
            self._order()
        given = {rank: self._taken(self._engines[rank], self._part(self._engines[rank]))}
        free = {rank: each for rank, each in self._engines.items() if len(each.running) < each.room.sequences}
        if self._num_waiting and free:
            # Whoever has least to write takes one at least, or all might leave it to each other.
            other = min(free, key=lambda each: free[each].left)
            given[other] = given.get(other, []) + self._taken(free[other], max(1, self._part(free[other])))
        return {rank: rows for rank, rows in given.items() if rows}

    def _taken(self, engine: _Engine, part: int) -> list[int]:
        """At most ``part`` of the rows that wait, which the engine begins."""
        wanted = min(engine.room.sequences - len(engine.running), part)
        front = self._queue[self._first : self._first + wanted]
        share = -(-self._num_waiting // len(self._engines))
        if share <= wanted and self._fitting(engine, front[:share], LAST_DEVIATIONS) == share:
            wanted = share
            front = front[:share]
        else:
            front = front[: self._fitting(engine, front, DEVIATIONS)]
        self._begin(engine, front)
        self._first += len(front)
        rows: list[int] = front.tolist()
        if len(front) < wanted:
            # There is no room for what is long, and until there is, what is short may come and go.
            back = self._queue[self._first : self._last][::-1][: wanted - len(front)]
            back = back[: self._fitting(engine, back, DEVIATIONS)]
            self._begin(engine, back)
            self._last -= len(back)
            rows += back.tolist()
        return rows

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        """``lengths`` are the responses' tokens; in ``steps`` so far the engine wrote a token of each that it had."""
        engine = self._engines[rank]
        running, _ = self._running(engine)
        # The engine puts off those that it was given last, when its cache is full.
        writing = running[np.cumsum(self._prompts[running] + self._written[running]) <= engine.room.tokens]
        more = self._written[writing] + max(0, steps - engine.steps)
        self._written[writing] = np.minimum(more, self._max_tokens - 1)
        engine.steps = max(engine.steps, steps)
        for row, length in zip(rows, lengths, strict=True):
            del engine.running[row]
            engine.ended.append(row)
            self._lengths[row] = length
        self._events += len(rows)

    def lost(self, rank: int) -> None:
        """All rows that the engine had, also those that it had finished, wait again. It gets no more."""
        engine = self._engines.pop(rank)
        rows = [*engine.running, *engine.ended]
        self._waiting[rows] = True
        self._written[rows] = self._before[rows]
        self._num_waiting += len(engine.running) + len(engine.ended)
        self._order()

    def _part(self, engine: _Engine) -> int:
        """How many of those that wait, from the first, it may take: with them it has no more to write than all others
        have. They may have room in a moment."""
        self._look(engine)
        waiting = np.cumsum(self._expected[self._groups[self._queue[self._first : self._last]]])
        if not len(waiting):
            return 0
        mean = (sum(other.left for other in self._engines.values()) + waiting[-1]) / len(self._engines)
        return max(int(np.searchsorted(waiting, mean - engine.left, side="right")), int(not engine.running))

    def _look(self, engine: _Engine) -> None:
        """How much it still has to write."""
        rows, written = self._running(engine)
        engine.left = float(self._expectation.left(rows, written.astype(np.float64), self._max_tokens - written).sum())

    def _running(self, engine: _Engine) -> tuple[Ints, Ints]:
        """Rows that it is writing, and their tokens so far."""
        rows = np.fromiter(engine.running, np.int64, len(engine.running))
        return rows, self._written[rows]

    def _takes_its_share(self, engine: _Engine) -> bool:
        """Whether it can write its share of all that wait at once."""
        share = self._queue[self._first : self._last : len(self._engines)]
        places = engine.room.sequences - len(engine.running)
        return len(share) <= places and self._fitting(engine, share, LAST_DEVIATIONS) == len(share)

    def _begin(self, engine: _Engine, rows: Ints) -> None:
        self._waiting[rows] = False
        self._num_waiting -= len(rows)
        engine.running |= dict.fromkeys(rows.tolist())

    def _fitting(self, engine: _Engine, rows: Ints, spare: float) -> int:
        """How many of ``rows``, from the first, fit into the engine's cache besides what it has."""
        prompts = self._prompts[rows]
        running, written = self._running(engine)
        most = np.concatenate([self._prompts[running], prompts]) + self._max_tokens
        fitting = len(rows)
        if most.sum() > engine.room.tokens:
            mean, variance = self._use(running, written)
            more_mean, more_variance = self._use(rows, self._written[rows])
            means = mean.sum(0) + np.cumsum(more_mean, 0)
            variances = variance.sum(0) + np.cumsum(more_variance, 0)
            fits = (means + spare * np.sqrt(variances)).max(1, initial=0) <= engine.room.tokens
            fitting = len(rows) if fits.all() else int(fits.argmin())
            # One alone is written whatever is expected of it: its longest was found to fit beforehand.
            fitting = max(fitting, int(len(running) == 0 < len(rows)))
        return fitting

    def _use(self, rows: Ints, written: Ints) -> tuple[Floats, Floats]:
        left = self._max_tokens - written
        return self._expectation.use(rows, self._prompts[rows], written.astype(np.float64), left)

    def _order(self) -> None:
        """Those that wait: first one of each group that has none yet, then by what is expected of their groups."""
        self._events = 0
        tokens = np.where(self._lengths > 0, self._lengths, self._written)
        known = np.flatnonzero(~self._waiting | (self._lengths > 0))
        self._expectation.learn(known, tokens[known].astype(np.float64), self._lengths[known] > 0)
        prompts = np.arange(len(self._expectation.factors))
        new = np.zeros(len(prompts), np.int64)
        # A row of each group stands for all.
        self._expected = self._expectation.left(
            np.searchsorted(self._groups, prompts), new.astype(np.float64), new + self._max_tokens
        )
        rows = np.flatnonzero(self._waiting)
        groups = self._groups[rows]
        begun_groups = np.zeros(len(self._expectation.factors), np.bool_)
        begun_groups[self._groups[known]] = True
        first = np.searchsorted(groups, groups)
        place = np.arange(len(rows)) - first
        probe = (place == 0) & ~begun_groups[groups]
        # Of groups of which nothing is known, samples in turn; and those of one group to different engines.
        turn = (groups + place) % len(begun_groups)
        older = self._older[groups]
        self._queue = rows[np.lexsort((turn, place, self._expectation.factors[groups], ~probe, ~older))]
        self._first, self._last = 0, len(self._queue)
