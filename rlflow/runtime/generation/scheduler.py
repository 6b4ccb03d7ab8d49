"""Which sample is written by which engine, and when: pure, without threads and without a clock.

Those that nobody has begun come first: one of each group, and then, from what these and all others show of a group's
length, the longest first, so that short ones fill the end (Graham 1969, LPT). An engine begins what it has room for
now, however long that may become. When its cache is about to overflow, it puts off those of which it has written most:
they wait with what is written, and whichever engine has room goes on with them, least written first (the
foreground-background rule: Nuyens and Wierman 2008). So all have had nearly as much time,
whatever their lengths turn out to be, and none begins when others end: to read again what is written costs little
beside an engine that writes one last sample. The more that wait, the less does that matter, and the more room is kept
so that fewer are put off. When none waits, the engine with most in its cache hands some over to the one with least.

What is expected of lengths decides about the order alone.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.generation.length_model import Expectation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The order of those that wait is made anew so often in a step. Each time costs a sort.
_ORDERS = 128
# An engine has room for as many more tokens of each of its samples as it writes between two of its messages. To begin
# more, for at least this part of the longest response for each sample that waits, over those that are being written,
# and for no more than that of any (``benchmarks/tail.py``).
_KEPT_FREE, _MOST_KEPT_FREE = 1 / 512, 1 / 16
# An engine hands samples over to one that holds less than it by this factor, and by this part of its cache.
_UNEVEN, _MATTERS = 1.3, 1 / 16
# And only those that may become longer still by this share of what must be read again.
_WORTH = 0.3


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
    """Rows."""
    leaving: Sequence[int] = ()
    """Rows that it has been asked to put off, and has not answered."""
    ended: list[int] = field(default_factory=list)
    steps: int = 0
    pace: int = 0
    """Steps between its last two messages."""
    held: int = 0
    """Tokens of its rows as of its last message: prompts, and what is written."""

    @property
    def share(self) -> float:
        """Of its room that is taken."""
        return max(len(self.running) / self.room.sequences, self.held / self.room.tokens)


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
        self._expectation = Expectation(self._groups, max_tokens, before)
        self._queue: list[tuple[bool, int, int, int]] = []
        self._events = 0
        self._every = max(1, int(self._waiting.sum()) // _ORDERS)
        self._order()

    @property
    def waiting(self) -> int:
        """Rows that no engine has."""
        return len(self._queue)

    @property
    def ranks(self) -> Sequence[int]:
        """The engines that are not lost."""
        return list(self._engines)

    @property
    def all_fit(self) -> bool:
        """Whether all rows that wait can be written at once, however long they become."""
        places = sum(engine.room.sequences for engine in self._engines.values())
        longest = int(self._prompts.max(initial=0)) + self._max_tokens
        each = -(-self.waiting // max(1, len(self._engines)))
        return self.waiting <= places and all(
            each <= engine.room.sequences and each * longest <= engine.room.tokens for engine in self._engines.values()
        )

    def room(self, rank: int) -> Room:
        return self._engines[rank].room

    def running(self, rank: int) -> int:
        """Rows that this engine is writing."""
        return len(self._engines[rank].running)

    def rows(self, rank: int) -> Sequence[int]:
        """Those that this engine has finished, ascending."""
        return sorted(self._engines[rank].ended)

    def begin(self) -> dict[int, list[int]]:
        """Rows that engines are to begin, or to go on with, now; each with the one that has most room."""
        if self._events >= self._every:
            self._order()
        given: dict[int, list[int]] = {}
        open_ranks = [(engine.share, rank) for rank, engine in self._engines.items()]
        heapq.heapify(open_ranks)
        while self._queue and open_ranks:
            _, rank = open_ranks[0]
            engine, row = self._engines[rank], self._queue[0][-1]
            if not self._fits(engine, row):
                heapq.heappop(open_ranks)
                continue
            heapq.heappop(self._queue)
            self._waiting[row] = False
            engine.running[row] = None
            engine.held += int(self._prompts[row] + self._written[row])
            given.setdefault(rank, []).append(row)
            heapq.heapreplace(open_ranks, (engine.share, rank))
        return given

    def put_off(self, rank: int) -> tuple[int, list[int]]:
        """An engine, and rows that it is to write no further: this one's, which has told of something, if its cache is
        about to overflow; or, when none waits, some that another can begin which has much less."""
        rows = self._overflowing(self._engines[rank])
        if not rows and not self._queue:
            by_held = sorted(self._engines, key=lambda each: self._engines[each].held)
            rank = by_held[-1]
            rows = self._handed_over(self._engines[rank], self._engines[by_held[0]])
        engine = self._engines[rank]
        if engine.leaving:
            return rank, []
        engine.leaving = rows
        return rank, rows

    def stop(self, rank: int) -> list[int]:
        """All rows that an engine has, and is to write no further."""
        return list(self._engines[rank].running)

    def returned(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Those of the rows that were to be put off that were not done, and the tokens that are written of each."""
        engine = self._engines[rank]
        engine.leaving = ()
        for row, length in zip(rows, lengths, strict=True):
            del engine.running[row]
            self._written[row] = length
            self._waiting[row] = True
            heapq.heappush(self._queue, (not self._older[self._groups[row]], length, 0, row))
        self._hold(engine)

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        """``lengths`` are the responses' tokens; in ``steps`` so far the engine wrote a token of each that it had."""
        engine = self._engines[rank]
        running = self._running(engine)
        new = max(0, steps - engine.steps)
        self._written[running] = np.minimum(self._written[running] + new, self._max_tokens - 1)
        engine.steps += new
        engine.pace = new or engine.pace
        for row, length in zip(rows, lengths, strict=True):
            del engine.running[row]
            engine.ended.append(row)
            self._lengths[row] = length
        self._hold(engine)
        self._events += len(rows)

    def lost(self, rank: int, written: Ints) -> None:
        """All rows that the engine had, also those that it had finished, wait again. It gets no more. ``written`` [R]:
        tokens of each row that waits with which another engine can go on."""
        engine = self._engines.pop(rank)
        rows = [*engine.running, *engine.ended]
        self._waiting[rows] = True
        self._lengths[rows] = 0
        self._written[self._waiting] = written[self._waiting]
        self._order()

    def _fits(self, engine: _Engine, row: int) -> bool:
        """One alone is begun whatever becomes of it: its longest was found to fit beforehand."""
        count = len(engine.running) + 1
        if count == 1:
            return True
        running = sum(len(each.running) for each in self._engines.values())
        kept_free = self._max_tokens * min(_KEPT_FREE * len(self._queue) / running, _MOST_KEPT_FREE)
        ahead = max(engine.pace, int(kept_free))
        held = engine.held + int(self._prompts[row] + self._written[row])
        return count <= engine.room.sequences and held + count * ahead <= engine.room.tokens

    def _overflowing(self, engine: _Engine) -> list[int]:
        """So that it has room for as much as it writes until its next message."""
        rows, count, held = self._running(engine), len(engine.running), engine.held
        put: list[int] = []
        for row in rows[np.argsort(-self._written[rows], kind="stable")].tolist():
            if count == 1 or held + count * engine.pace <= engine.room.tokens:
                break
            put.append(row)
            held -= int(self._prompts[row] + self._written[row])
            count -= 1
        return put

    def _handed_over(self, fullest: _Engine, emptiest: _Engine) -> list[int]:
        """So that both hold as much; first those that cost least to read again."""
        rows, over = self._running(fullest), (fullest.held - emptiest.held) // 2
        if fullest.held <= max(_UNEVEN * emptiest.held, emptiest.held + _MATTERS * fullest.room.tokens):
            return []
        rows = rows[np.argsort(self._written[rows], kind="stable")]
        held = self._prompts[rows] + self._written[rows]
        worth = self._max_tokens - self._written[rows] >= _WORTH * held
        places = emptiest.room.sequences - len(emptiest.running)
        handed: list[int] = rows[(np.cumsum(held) <= over) & worth][:places].tolist()
        return handed

    def _running(self, engine: _Engine) -> Ints:
        return np.fromiter(engine.running, np.int64, len(engine.running))

    def _hold(self, engine: _Engine) -> None:
        rows = self._running(engine)
        engine.held = int((self._prompts[rows] + self._written[rows]).sum())

    def _order(self) -> None:
        """Those that wait: the least written first, and of those that are not begun one of each group that has none
        yet, then by what is expected of their groups."""
        self._events = 0
        tokens = np.where(self._lengths > 0, self._lengths, self._written)
        known = np.flatnonzero(~self._waiting | (tokens > 0))
        self._expectation.learn(known, tokens[known].astype(np.float64), self._lengths[known] > 0)
        rows = np.flatnonzero(self._waiting)
        groups = self._groups[rows]
        begun_groups = np.zeros(len(self._expectation.factors), np.bool_)
        begun_groups[self._groups[known]] = True
        place = np.arange(len(rows)) - np.searchsorted(groups, groups)
        probe = (place == 0) & ~begun_groups[groups]
        # Of groups of which nothing is known, samples in turn; and those of one group to different engines.
        turn = (groups + place) % len(begun_groups)
        order = np.lexsort((turn, place, self._expectation.factors[groups], ~probe))
        # Ascending, and so a heap.
        self._queue = sorted(
            zip(
                (~self._older[groups[order]]).tolist(),
                self._written[rows[order]].tolist(),
                range(len(rows)),
                rows[order].tolist(),
                strict=True,
            )
        )
