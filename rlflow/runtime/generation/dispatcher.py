"""Generation over several engines that take new samples while they write: each begins some when it has room, and what
one has put off another goes on with.

Messages are few: an engine is given rows in lists, and answers when some are done, or after a second. What it has
written it hands over at the end, or in a few parts where somebody works on them meanwhile, and of rows that it puts off
at once; from engine to engine, this process holds references. The rows of an engine that fails go to the others.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress
from rlflow.errors import EngineError
from rlflow.runtime.generation.partial_results import Listener, Listening
from rlflow.runtime.generation.partial_rollouts import Begun
from rlflow.runtime.generation.scheduler import Room, Scheduler
from rlflow.runtime.objects.slices import BatchSlice, SharedBatch

# While rows wait, those that are done are told together: this part of what an engine writes at once.
_SHARE = 32
_Method = Literal["advance", "preempt", "take_rollouts"]


class AllFailedError(EngineError):
    """The failure of all engines before enough was written. All that they wrote is lost with them."""

    def __init__(self, lost: Mapping[int, EngineError]) -> None:
        super().__init__(str(next(iter(lost.values()))))
        self.lost = lost


class Engines(Protocol):
    """The workers of a role, by rank."""

    def __len__(self) -> int: ...

    def submit(self, rank: int, method: str, *arguments: Any) -> "Future[Any]": ...


def pulled(
    engines: Engines,
    ranks: Collection[int],
    prompts: Prompts,
    sampling: Sampling,
    before: NDArray[np.float64] | None,
    begun: Rollouts | None,
    enough: int,
    listener: Listener | None = None,
) -> tuple[Rollouts, dict[int, EngineError]]:
    """``begun`` as far as it is written when ``enough`` prompts have all of their samples, in the order of keys. And
    the engines of ``ranks`` that failed, and why.

    ``before``: lengths of responses that came in the step before. The ``listener`` is told from this thread; what it is
    told is the first time that it is there. Raises AllFailedError.
    """
    whole = SharedBatch(prompts).slice(np.arange(len(prompts)))
    lost: dict[int, EngineError] = {}
    while True:
        groups = GroupProgress(prompts, sampling, begun)
        if begun is not None and groups.num_complete >= enough:
            return begun, lost
        alive = [rank for rank in ranks if rank not in lost]
        if not alive:
            raise AllFailedError(lost)
        round_ = _Round(engines, whole, prompts, sampling, groups, enough, lost, listener)
        begun = groups.merge(round_.run(alive, before))


class _Round:
    """One pass over rows that are to be written. What an engine that fails at its end has written is missing after."""

    def __init__(
        self,
        engines: Engines,
        whole: BatchSlice,
        prompts: Prompts,
        sampling: Sampling,
        groups: GroupProgress,
        enough: int,
        lost: dict[int, EngineError],
        listener: Listener | None,
    ) -> None:
        """It ends when ``enough`` groups are whole. Engines that fail are added to ``lost``."""
        self._engines, self._whole, self._sampling, self._lost = engines, whole, sampling, lost
        self._listener = listener
        self._listening: Listening | None = None
        self._groups, self._enough, self._stopping = groups, enough, False
        self._prompt_lengths = prompts.ids.lengths
        self._begun = Begun(groups)
        self._calls: dict[Future[Any], tuple[_Method, int]] = {}
        self._used: set[int] = set()
        self._scheduler: Scheduler

    def run(self, ranks: Collection[int], before: NDArray[np.float64] | None) -> list[Rollouts]:
        """What is new: rows that are done, and those that are not as far as they are."""
        calls = {rank: self._engines.submit(rank, "begin_session", self._whole, self._sampling) for rank in ranks}
        rooms = {rank: Room(*room) for rank, room in self._results(calls).items()}
        self._scheduler = scheduler = Scheduler(
            self._prompt_lengths,
            self._sampling.group_size,
            self._sampling.max_tokens,
            rooms,
            rows=np.flatnonzero(~self._groups.done),
            before=before,
            written=self._groups.initial_lengths,
        )
        is_simple = self._groups.partial is None and self._enough == len(self._prompt_lengths)
        if self._listener is not None:
            self._listening = Listening(self._listener, scheduler.waiting, len(rooms))
        elif scheduler.all_fit and is_simple:
            return self._written_at_once()
        self._begin()
        while self._calls:
            for call in wait(list(self._calls), return_when=FIRST_COMPLETED).done:
                self._answered(call)
        used = [rank for rank in scheduler.ranks if rank in self._used]
        calls = {rank: self._engines.submit(rank, "finish_session") for rank in used}
        done = [written for written in self._results(calls).values() if written is not None]
        for written in done:
            # Some may have been done before their engine was told to put them off, and were never told of.
            self._begun.forget(self._groups.rows_of(written.keys).tolist())
        parts = self._listening.parts if self._listening else []
        return [*parts, *done, *self._begun.new()]

    def _written_at_once(self) -> list[Rollouts]:
        calls = {
            rank: self._engines.submit(rank, "generate_rows", self._whole, self._sampling, packed(rows))
            for rank, rows in self._scheduler.begin().items()
        }
        return list(self._results(calls).values())

    def _begin(self) -> None:
        for rank, rows in self._scheduler.begin().items():
            self._write(rank, rows)

    def _write(self, rank: int, rows: Sequence[int]) -> None:
        """Gives it these rows, and is told when enough are done: when none wait, that is all of them."""
        count, scheduler = self._scheduler.running(rank), self._scheduler
        whole_groups = self._enough < len(self._prompt_lengths)
        enough = max(1, scheduler.room(rank).sequences // _SHARE) if scheduler.waiting or whole_groups else count
        if self._listening:
            enough = min(enough, self._listening.size)
        begun = self._begun.of(rows)
        parts = [] if begun is None else [SharedBatch(begun).slice(np.arange(len(begun)))]
        self._call("advance", rank, packed(rows), enough, *parts)
        self._used.add(rank)

    def _call(self, method: _Method, rank: int, *arguments: Any) -> None:
        self._calls[self._engines.submit(rank, method, *arguments)] = (method, rank)

    def _answered(self, call: "Future[Any]") -> None:
        method, rank = self._calls.pop(call)
        if rank in self._lost:
            return
        try:
            result = call.result()
        except EngineError as error:
            self._fail(rank, error)
            return
        if method == "advance":
            self._progressed(rank, result)
        elif method == "preempt":
            self._returned(rank, result)
        elif self._listening:
            self._listening.add(rank, result)
        if not self._stopping:
            self._begin()
            if method == "advance" and self._scheduler.running(rank) and ("advance", rank) not in self._calls.values():
                self._write(rank, [])
        elif method == "advance":
            # It may have begun them after it was told to put all off.
            self._put_off(rank, self._scheduler.stop(rank))

    def _returned(self, rank: int, written: Rollouts | None) -> None:
        if written is None:
            self._scheduler.returned(rank, [], [])
            return
        rows = self._groups.rows_of(written.keys).tolist()
        self._begun.add(rank, rows, written)
        self._scheduler.returned(rank, rows, written.response_ids.lengths.tolist())

    def _progressed(self, rank: int, progress: Any) -> None:
        ended, lengths = (np.frombuffer(part, np.int32).tolist() for part in (progress.rows, progress.lengths))
        self._scheduler.finished(rank, ended, lengths, progress.decode_steps)
        self._begun.forget(ended)
        self._groups.done[ended] = True
        if self._stopping:
            return
        if self._listening and (rows := self._listening.due(rank, ended)):
            self._call("take_rollouts", rank, packed(rows))
        if self._groups.num_complete >= self._enough and self._enough < len(self._prompt_lengths):
            self._stopping = True
            for each in self._scheduler.ranks:
                self._put_off(each, self._scheduler.stop(each))
            return
        self._put_off(*self._scheduler.put_off(rank))

    def _put_off(self, rank: int, rows: Sequence[int]) -> None:
        if rows:
            self._call("preempt", rank, packed(rows))

    def _lose(self, rank: int, error: EngineError) -> None:
        self._lost[rank] = error
        if self._listening:
            self._listening.lose(rank)

    def _fail(self, rank: int, error: EngineError) -> None:
        """What it had handed over is lost with it."""
        self._lose(rank, error)
        self._groups.done[self._scheduler.rows(rank)] = False
        self._begun.lose(rank)
        self._scheduler.lost(rank, self._begun.lengths)
        if not self._stopping:
            self._begin()

    def _results(self, calls: "dict[int, Future[Any]]") -> dict[int, Any]:
        """Of the engines that do not fail."""
        results: dict[int, Any] = {}
        for rank, call in calls.items():
            try:
                results[rank] = call.result()
            except EngineError as error:
                self._lose(rank, error)
        return results


def packed(rows: Sequence[int]) -> bytes:
    """For a message."""
    return np.array(rows, np.int32).tobytes()
