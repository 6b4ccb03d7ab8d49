"""A pure scheduler that decides which engine generates which sample, and when: without threads and without a clock.

Samples of earlier steps come first. Within a step, samples that were never started come first: one of each group, and
then the longest first, as far as these and all others show the length of a group, so that short ones fill the end
(longest processing time first, Graham 1969). An engine starts what it has room for now, however long that may become.
When its cache is about to overflow, it preempts its longest partial rollouts. They are queued, and whichever engine has
room resumes them, shortest first (the foreground-background rule: Nuyens and Wierman 2008).

So all samples get nearly the same time, whatever their lengths turn out to be, and none starts when others end: to
prefill a partial rollout again costs little compared with an engine that generates one last sample alone. The longer
the queue, the less that matters, and the more room an engine keeps free, so that it preempts less. When the queue is
empty, the engine with the fullest cache migrates some samples to the emptiest one.

Expected lengths decide about the order alone.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlflow.engines.base import Sampling
from rlflow.runtime.generation.engine_state import Capacity, EngineState
from rlflow.runtime.generation.length_model import LengthModel
from rlflow.runtime.generation.row_queue import RowQueue

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How often in a step the queue is ordered anew. Each time costs a sort.
_REORDERS = 128
# An engine keeps room for as many more tokens of each of its samples as it generates between two of its messages. To
# start more, it keeps at least the first part of the longest response for each queued sample, divided by the number of
# running ones, and at most the second part (``benchmarks/tail.py``).
_FREE_PER_QUEUED, _MAX_FREE = 1 / 512, 1 / 16
# An engine holds so many more samples than it generates at once: the next ones, until its report of finished ones is
# answered.
_SPARE = 1 / 32
# An engine migrates samples to one whose cache holds less by this factor, and by this part of its own capacity.
_UNEVEN, _MIN_DIFFERENCE = 1.3, 1 / 16
# It migrates only samples that may still grow by this share of the tokens to prefill again.
_MIN_GROWTH = 0.3


class Scheduler:
    """The queue of samples and the state of all engines, by row ``prompt * group_size + sample``.

    Every row is finished exactly once. The same events in the same order lead to the same decisions.
    Shapes: P prompts, R rows.
    """

    def __init__(
        self,
        prompt_lengths: Ints,
        sampling: Sampling,
        capacities: Mapping[int, Capacity],
        *,
        rows: Ints | None = None,
        previous_lengths: Floats | None = None,
        initial_lengths: Ints | None = None,
        steps: Ints | None = None,
    ) -> None:
        """Queue ``rows``, by default all. ``prompt_lengths`` [P] are in tokens.

        ``previous_lengths``: lengths of some responses of the step before. ``initial_lengths`` [R]: the tokens of each
        partial rollout, or, of a row that is not queued, of the finished response. ``steps`` [P]: the step of each
        prompt, by default the same. Earlier steps come first, and within a step groups that have a partial rollout.
        """
        group_size, max_tokens = sampling.group_size, sampling.max_tokens
        self._prompt_lengths = np.repeat(prompt_lengths, group_size)
        self._groups = np.repeat(np.arange(len(prompt_lengths)), group_size)
        self._max_tokens = max_tokens
        self._engines = {rank: EngineState(capacity) for rank, capacity in capacities.items()}
        num_rows = len(self._groups)
        initial = np.zeros(num_rows, np.int64) if initial_lengths is None else initial_lengths
        self._steps = np.repeat(np.zeros(len(prompt_lengths), np.int64) if steps is None else steps, group_size)
        """[R]: the step of each row."""
        self._final_lengths = np.zeros(num_rows, np.int64)
        """[R]: the length of a finished response; 0 for others."""
        self._lengths = initial.copy()
        """[R]: the generated tokens, as far as engines have reported them."""
        self._is_queued = np.zeros(num_rows, np.bool_)
        self._is_queued[np.arange(num_rows) if rows is None else rows] = True
        self._final_lengths[~self._is_queued] = initial[~self._is_queued]
        self._length_model = LengthModel(self._groups, max_tokens, previous_lengths)
        is_new = np.bincount(self._groups, initial) == 0
        self._queue = RowQueue(2 * self._steps + is_new[self._groups])
        self._num_running = 0
        self._resumed = {rank: self._take_interrupted(engine) for rank, engine in self._engines.items()}
        """The rows of each engine that it resumes before all others."""
        self._finished_since_order = 0
        self._reorder_after = max(1, int(self._is_queued.sum()) // _REORDERS)
        self._queue_all()

    @property
    def num_queued(self) -> int:
        """Return the number of rows that no engine has."""
        return len(self._queue)

    @property
    def ranks(self) -> Sequence[int]:
        """Return the engines that have not failed."""
        return list(self._engines)

    def capacity(self, rank: int) -> Capacity:
        return self._engines[rank].capacity

    def running_rows(self, rank: int) -> list[int]:
        """Return the rows that an engine generates."""
        return list(self._engines[rank].running)

    def finished_rows(self, rank: int) -> Sequence[int]:
        """Return the rows that an engine has finished, in ascending order."""
        return sorted(self._engines[rank].finished)

    def assign(self) -> dict[int, list[int]]:
        """Take rows from the queue, each for the engine with the smallest load. Return the new rows of each engine.

        An engine that had no room is not asked again before it reports, so that one report costs little among many
        engines.
        """
        if self._finished_since_order >= self._reorder_after and self._queue.num_new:
            self._order()
        assigned, self._resumed = {rank: rows for rank, rows in self._resumed.items() if rows}, {}
        if not self._queue:
            return assigned
        with_room = [(engine.load, rank) for rank, engine in self._engines.items() if engine.may_have_room]
        heapq.heapify(with_room)
        while self._queue and with_room:
            _, rank = with_room[0]
            engine, row = self._engines[rank], self._queue.first
            if not self._fits(engine, row):
                engine.may_have_room = False
                heapq.heappop(with_room)
                continue
            self._queue.pop()
            self._is_queued[row] = False
            engine.running[row] = None
            self._num_running += 1
            engine.tokens += int(self._prompt_lengths[row] + self._lengths[row])
            assigned.setdefault(rank, []).append(row)
            heapq.heapreplace(with_room, (engine.load, rank))
        return assigned

    def preempt(self, rank: int) -> tuple[int, list[int]]:
        """Return an engine and the rows that it must preempt, after the engine ``rank`` has reported.

        It is that engine if its cache is about to overflow. If the queue is empty, it is the fullest engine when
        another one has much more room.
        """
        rows = self._overflowing(self._engines[rank])
        if not rows and not self._queue:
            by_tokens = [(engine.tokens, each) for each, engine in self._engines.items()]
            rank, emptiest = max(by_tokens)[1], self._engines[min(by_tokens)[1]]
            if rows := self._migrating(self._engines[rank], emptiest):
                # It may have had no room for an earlier row.
                emptiest.may_have_room = True
        engine = self._engines[rank]
        if engine.leaving:
            return rank, []
        engine.leaving = rows
        return rank, rows

    def preempted(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Queue the rows that an engine has preempted, with their generated tokens. Others were finished before."""
        engine = self._engines[rank]
        engine.leaving = ()
        for row, length in zip(rows, lengths, strict=True):
            self._remove(engine, row)
            self._lengths[row] = length
            self._is_queued[row] = True
            self._queue.add_partial(row, length)
        self._update_tokens(engine)

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        """Note an engine's report: finished rows, the lengths of their responses, and all its decode steps so far.

        In each step an engine generates one token of each of its rows.
        """
        engine = self._engines[rank]
        running = self._running(engine)
        new = max(0, steps - engine.steps)
        self._lengths[running] = np.minimum(self._lengths[running] + new, self._max_tokens - 1)
        engine.steps += new
        engine.pace = new or engine.pace
        for row, length in zip(rows, lengths, strict=True):
            self._remove(engine, row)
            engine.finished.append(row)
            self._final_lengths[row] = length
        self._update_tokens(engine)
        self._finished_since_order += len(rows)

    def engine_failed(self, rank: int, partial_lengths: Ints) -> None:
        """Remove an engine, and queue all its rows again, the finished ones too.

        ``partial_lengths`` [R]: the tokens that another engine can resume each queued row with.
        """
        engine = self._engines.pop(rank)
        self._num_running -= len(engine.running)
        rows = [*engine.running, *engine.finished]
        self._is_queued[rows] = True
        self._final_lengths[rows] = 0
        self._lengths[self._is_queued] = partial_lengths[self._is_queued]
        self._queue_all()

    def _take_interrupted(self, engine: EngineState) -> list[int]:
        """Return the rows that an engine still has from before an interruption. It had room for them."""
        rows = np.frombuffer(engine.capacity.interrupted, np.int32)
        rows = rows[self._is_queued[rows]]
        self._is_queued[rows] = False
        engine.running = dict.fromkeys(rows.tolist())
        self._num_running += len(rows)
        self._update_tokens(engine)
        return list(engine.running)

    def _fits(self, engine: EngineState, row: int) -> bool:
        """Return whether an engine has room for a row. A single row always fits, which was checked beforehand."""
        count = len(engine.running) + 1
        if count == 1:
            return True
        free = self._max_tokens * min(_FREE_PER_QUEUED * len(self._queue) / self._num_running, _MAX_FREE)
        ahead = max(engine.pace, int(free))
        tokens = engine.tokens + int(self._prompt_lengths[row] + self._lengths[row])
        sequences = engine.capacity.sequences
        return count <= sequences + int(_SPARE * sequences) and tokens + count * ahead <= engine.capacity.tokens

    def _overflowing(self, engine: EngineState) -> list[int]:
        """Return the rows that must leave so that the others have room until the engine's next message.

        They are rows of the latest step, the longest first.
        """
        rows, count, tokens = self._running(engine), len(engine.running), engine.tokens
        leaving: list[int] = []
        for row in rows[np.lexsort((-self._lengths[rows], -self._steps[rows]))].tolist():
            if count == 1 or tokens + count * engine.pace <= engine.capacity.tokens:
                break
            leaving.append(row)
            tokens -= int(self._prompt_lengths[row] + self._lengths[row])
            count -= 1
        return leaving

    def _migrating(self, fullest: EngineState, emptiest: EngineState) -> list[int]:
        """Return the shortest rows that make both engines hold the same number of tokens when they migrate."""
        rows, over = self._running(fullest), (fullest.tokens - emptiest.tokens) // 2
        minimum = emptiest.tokens + _MIN_DIFFERENCE * fullest.capacity.tokens
        if fullest.tokens <= max(_UNEVEN * emptiest.tokens, minimum):
            return []
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        tokens = self._prompt_lengths[rows] + self._lengths[rows]
        is_worth_it = self._max_tokens - self._lengths[rows] >= _MIN_GROWTH * tokens
        count = emptiest.capacity.sequences - len(emptiest.running)
        migrating: list[int] = rows[(np.cumsum(tokens) <= over) & is_worth_it][:count].tolist()
        return migrating

    def _running(self, engine: EngineState) -> Ints:
        return np.fromiter(engine.running, np.int64, len(engine.running))

    def _remove(self, engine: EngineState, row: int) -> None:
        del engine.running[row]
        self._num_running -= 1

    def _update_tokens(self, engine: EngineState) -> None:
        rows = self._running(engine)
        engine.tokens = int((self._prompt_lengths[rows] + self._lengths[rows]).sum())
        engine.may_have_room = True

    def _queue_all(self) -> None:
        """Build the queue from the rows that no engine has."""
        rows = np.flatnonzero(self._is_queued)
        is_partial = self._lengths[rows] > 0
        self._queue.set_partial(rows[is_partial], self._lengths[rows[is_partial]])
        self._queue.set_new(rows[~is_partial])
        self._order()

    def _order(self) -> None:
        """Order the rows that were never started.

        One of each group without any comes first, and then those of the groups with the longest expected responses.
        """
        self._finished_since_order = 0
        tokens = np.where(self._final_lengths > 0, self._final_lengths, self._lengths)
        started = np.flatnonzero(~self._is_queued | (tokens > 0))
        self._length_model.update(started, tokens[started].astype(np.float64), self._final_lengths[started] > 0)
        rows = self._queue.new_rows
        groups, num_groups = self._groups[rows], len(self._length_model.factors)
        is_started_group = np.zeros(num_groups, np.bool_)
        is_started_group[self._groups[started]] = True
        place = np.arange(len(rows)) - np.searchsorted(groups, groups)
        is_probe = (place == 0) & ~is_started_group[groups]
        # Groups of which nothing is known take turns; the samples of one group go to different engines.
        turn = (groups + place) % num_groups
        factor_rank = np.unique(self._length_model.factors, return_inverse=True)[1]
        # One number sorts several times as fast as four.
        rank = (~is_probe * num_groups + factor_rank[groups]) * len(self._groups) + place * num_groups + turn
        self._queue.set_new(rows[np.argsort(rank)])
