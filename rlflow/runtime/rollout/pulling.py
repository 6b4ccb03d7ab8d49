"""Generation over several engines that take new samples while they write: each takes some when it has room.

Messages are few: an engine is given rows in lists, and answers when some are done. What it has written it hands over
once, at the end. The rows of an engine that fails go to the others.
"""

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.groups import Groups
from rlflow.errors import EngineError
from rlflow.runtime.data_plane.parts import Part, Whole
from rlflow.runtime.rollout.scheduling import Room, Scheduler

# Rows that are done are told together, this part of what an engine writes at once.
_SHARE = 32


class Engines(Protocol):
    """The workers of a role, by rank."""

    def __len__(self) -> int: ...

    def submit(self, rank: int, method: str, *arguments: Any) -> "Future[Any]": ...


@dataclass
class Pulled:
    """What became of a generation."""

    rollouts: list[Rollouts] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    """Of each of the rollouts, in their order."""
    lost: dict[int, EngineError] = field(default_factory=dict)
    """Engines that failed, and why."""

    def joined(self) -> Rollouts:
        """In the order of rows."""
        whole = Rollouts.joined(self.rollouts)
        order = np.argsort(np.concatenate(self.rows))
        return whole if np.array_equal(order, np.arange(len(order))) else whole.take(order)


def pulled(
    engines: Engines, ranks: Collection[int], prompts: Prompts, sampling: Sampling, before: NDArray[np.float64] | None
) -> Pulled:
    """Row ``prompt * group_size + sample`` of every sample, by the engines of ``ranks``.

    ``before``: lengths of responses that came in the step before. Raises EngineError when all engines have failed.
    """
    done = Pulled()
    whole = Whole(prompts).part(np.arange(len(prompts)))
    rows = np.arange(len(prompts) * sampling.group_size)
    while len(rows):
        alive = [rank for rank in ranks if rank not in done.lost]
        if not alive:
            raise next(iter(done.lost.values()))
        _Round(engines, whole, prompts, sampling, done).run(alive, rows, before)
        rows = np.setdiff1d(rows, np.concatenate([*done.rows, np.zeros(0, np.int64)]))
    return done


def pulled_on(
    engines: Engines,
    ranks: Collection[int],
    prompts: Prompts,
    sampling: Sampling,
    before: NDArray[np.float64] | None,
    begun: Rollouts | None,
    enough: int,
) -> tuple[Rollouts, dict[int, EngineError]]:
    """``begun`` as far as it is written when so many prompts have all of their samples, in the order of keys.

    And the engines that failed, and why. Raises EngineError when all engines have failed.
    """
    whole = Whole(prompts).part(np.arange(len(prompts)))
    lost: dict[int, EngineError] = {}
    while True:
        groups = Groups(prompts, sampling, begun)
        if begun is not None and groups.num_whole >= enough:
            return begun, lost
        alive = [rank for rank in ranks if rank not in lost]
        if not alive:
            raise next(iter(lost.values()))
        done = Pulled(lost=lost)
        _Round(engines, whole, prompts, sampling, done, groups, enough).run(alive, np.flatnonzero(~groups.done), before)
        begun = groups.joined(done.rollouts)


class _Round:
    """One pass over rows that are to be written. What an engine that fails at its end has written is missing after."""

    def __init__(
        self,
        engines: Engines,
        whole: Part,
        prompts: Prompts,
        sampling: Sampling,
        done: Pulled,
        groups: Groups | None = None,
        enough: int = 0,
    ) -> None:
        """With ``groups`` it ends when ``enough`` of them are whole."""
        self._engines, self._whole, self._sampling, self._done = engines, whole, sampling, done
        self._groups, self._enough, self._stopping = groups, enough, False
        self._prompt_lengths = prompts.ids.lengths
        self._calls: dict[Future[Any], int] = {}
        self._scheduler: Scheduler

    def run(self, ranks: Collection[int], rows: NDArray[np.int64], before: NDArray[np.float64] | None) -> None:
        groups = self._groups
        earlier = None if groups is None else groups.begun
        begun = [] if earlier is None else [Whole(earlier).part(np.arange(len(earlier)))]
        given_rooms = self._each(ranks, "begin", self._whole, self._sampling, *begun)
        rooms = {rank: Room(*room) for rank, room in given_rooms.items()}
        self._scheduler = scheduler = Scheduler(
            self._prompt_lengths,
            self._sampling.group_size,
            self._sampling.max_tokens,
            rooms,
            rows=rows,
            before=before,
            written=None if groups is None else groups.written,
        )
        if scheduler.all_fit and groups is None:
            given = scheduler.deal()
            arguments = {rank: (self._whole, self._sampling, packed(given[rank])) for rank in rooms if given[rank]}
            calls = {rank: self._engines.submit(rank, "write_rows", *sent) for rank, sent in arguments.items()}
            self._collect({rank: np.sort(given[rank]) for rank in calls}, calls)
            return
        for rank, given_rows in scheduler.deal().items():
            self._write(rank, given_rows)
        while self._calls:
            for call in wait(self._calls, return_when=FIRST_COMPLETED).done:
                self._answered(self._calls.pop(call), call)
        ranks = [rank for rank in scheduler.ranks if scheduler.rows(rank) or scheduler.running(rank)]
        written = {rank: np.array(scheduler.rows(rank), np.int64) for rank in ranks}
        self._collect(written, {rank: self._engines.submit(rank, "finish") for rank in written})

    def _write(self, rank: int, rows: list[int]) -> None:
        """Gives it these rows, and is told when enough are done: when none wait, that is all of them."""
        each = self._scheduler.waiting or self._groups is not None
        enough = max(1, self._scheduler.room(rank).sequences // _SHARE) if each else 0
        self._calls[self._engines.submit(rank, "write", packed(rows), enough)] = rank

    def _answered(self, rank: int, call: "Future[Any]") -> None:
        scheduler = self._scheduler
        if rank in self._done.lost:
            return
        try:
            progress = call.result()
        except EngineError as error:
            self._done.lost[rank] = error
            if self._groups is not None:
                self._groups.done[scheduler.rows(rank)] = False
            scheduler.lost(rank)
            if self._stopping:
                return
            # Others may be waiting for their last rows, and have room.
            for other in scheduler.ranks:
                self._give(scheduler.next(other))
            return
        if self._stopping:
            return
        ended, lengths = (np.frombuffer(part, np.int32).tolist() for part in (progress.rows, progress.lengths))
        scheduler.finished(rank, ended, lengths, progress.steps)
        if self._groups is not None:
            self._groups.done[ended] = True
            if self._groups.num_whole >= self._enough:
                self._stop()
                return
        self._give(scheduler.next(rank))
        if scheduler.running(rank) and rank not in self._calls.values():
            self._write(rank, [])

    def _stop(self) -> None:
        self._stopping = True
        self._calls |= {self._engines.submit(rank, "stop"): rank for rank in self._scheduler.ranks}

    def _give(self, rows: dict[int, list[int]]) -> None:
        for rank, given in rows.items():
            self._write(rank, given)

    def _each(self, ranks: Collection[int], method: str, *arguments: Any) -> dict[int, Any]:
        calls = {rank: self._engines.submit(rank, method, *arguments) for rank in ranks}
        answers: dict[int, Any] = {}
        for rank, call in calls.items():
            try:
                answers[rank] = call.result()
            except EngineError as error:
                self._done.lost[rank] = error
        return answers

    def _collect(self, rows: dict[int, NDArray[np.int64]], calls: "dict[int, Future[Any]]") -> None:
        for rank, call in calls.items():
            try:
                written = call.result()
            except EngineError as error:
                self._done.lost[rank] = error
                continue
            if written is not None:
                self._done.rollouts.append(written)
                self._done.rows.append(rows[rank])


def packed(rows: list[int]) -> bytes:
    """For a message."""
    return np.array(rows, np.int32).tobytes()
