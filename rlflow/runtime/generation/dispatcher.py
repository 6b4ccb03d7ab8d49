"""Dispatches the samples of one generation to several concurrent engines.

Each engine starts samples when it has room, and resumes those that another has preempted.

Messages are few. An engine gets rows in lists and answers when some are finished, or after a second. It returns its
rollouts at the end, or in a few parts when a subscriber works on them meanwhile, and partial rollouts when it preempts
them. From engine to engine, only references pass through this process. The rows of an engine that fails go to others.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress
from rlflow.engines.serving.sessions import pack_rows
from rlflow.errors import EngineError, EnvironmentFailedError
from rlflow.runtime.generation.early_results import CompleteSteps, EarlyResults, PartialResults
from rlflow.runtime.generation.engine_state import AllEnginesFailedError, Capacity
from rlflow.runtime.generation.partial_rollouts import PartialRollouts
from rlflow.runtime.generation.scheduler import Scheduler
from rlflow.runtime.objects.slices import BatchSlice, SharedBatch
from rlflow.runtime.protocols import Subscriber, Workers

# While rows are queued, an engine reports when one in so many of the rows that it can generate at once is finished.
_REPORTS = 32
# Without queued rows, it is one in so many of those that it generates: the end of a step may wait for the last of them.
_LAST_REPORTS = 8
_Method = Literal["advance", "preempt", "take_rollouts"]


@dataclass(frozen=True)
class LaterSteps:
    """The hooks of a generation of several steps: complete steps leave it early, and an interrupt ends it."""

    interrupt: "Future[None]"
    """Completes when the generation must end, complete or not."""
    on_step: Callable[[int, Rollouts], None]
    """Gets each step with its rollouts as soon as they are complete, while others are still generated."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The samples that engines generate together."""

    prompts: Prompts
    sampling: Sampling
    partial: Rollouts | None = None
    """The rollouts to start from."""
    ahead: LaterSteps | None = None
    subscriber: Subscriber | None = None
    """Called from the thread of the generation; it gets each finished sample once."""


def dispatch(
    engines: Workers,
    ranks: Collection[int],
    request: GenerationRequest,
    previous_lengths: NDArray[np.float64] | None,
) -> tuple[Rollouts | None, dict[int, EngineError]]:
    """Generate until all samples are done, or the generation is interrupted.

    ``previous_lengths`` are lengths of responses in the step before. Returns the rollouts in the order of keys, None if
    interrupted without any, and the failures of engines by rank. Raises AllEnginesFailedError.
    """
    prompts, ahead, partial = request.prompts, request.ahead, request.partial
    batch = SharedBatch(prompts).slice(np.arange(len(prompts)))
    failures: dict[int, EngineError] = {}
    while True:
        groups = GroupProgress(prompts, request.sampling, partial)
        if (ahead is not None and ahead.interrupt.done()) or groups.done.all():
            return partial, failures
        alive = [rank for rank in ranks if rank not in failures]
        if not alive:
            raise AllEnginesFailedError(failures)
        one_pass = _Pass(engines, batch, request, groups, failures)
        partial = groups.merge(one_pass.run(alive, previous_lengths))


class _Pass:
    """One pass over all unfinished rows. Rows of an engine that fails at the very end need another pass."""

    def __init__(
        self,
        engines: Workers,
        batch: BatchSlice,
        request: GenerationRequest,
        groups: GroupProgress,
        failures: dict[int, EngineError],
    ) -> None:
        """Prepare a pass, which adds failed engines to ``failures``."""
        self._engines, self._batch, self._sampling, self._failures = engines, batch, request.sampling, failures
        self._subscriber = request.subscriber
        self._results: EarlyResults | None = None
        self._most_unreported = 0
        """The finished rows that an engine need not report yet; 0 where the scheduler alone decides."""
        self._groups, self._ahead, self._is_stopping = groups, request.ahead, False
        self._prompt_lengths, self._steps = request.prompts.ids.lengths, request.prompts.keys[:, 0]
        self._partial = PartialRollouts(groups)
        self._calls: dict[Future[Any], tuple[_Method, int, Sequence[int]]] = {}
        self._answered: SimpleQueue[Future[Any]] = SimpleQueue()
        self._advancing: Counter[int] = Counter()
        """How many calls to advance each engine has not answered."""
        self._preempting: dict[Future[Any], tuple[int, frozenset[int]]] = {}
        """The engine and the rows of each preemption that is under way."""
        self._to_stop_again: set[int] = set()
        """Engines that may have started rows after they were asked to preempt all."""
        self._used: set[int] = set()
        self._scheduler: Scheduler

    def run(self, ranks: Collection[int], previous_lengths: NDArray[np.float64] | None) -> list[Rollouts]:
        """Return the new rollouts: finished ones, and partial ones as far as they are."""
        session = (self._batch, self._sampling, len(ranks))
        calls = {rank: self._engines.submit(rank, "begin_session", *session) for rank in ranks}
        capacities = {rank: Capacity(*capacity) for rank, capacity in self._successes(calls).items()}
        self._scheduler = scheduler = Scheduler(
            self._prompt_lengths,
            self._sampling,
            capacities,
            rows=np.flatnonzero(~self._groups.done),
            previous_lengths=previous_lengths,
            initial_lengths=self._groups.initial_lengths,
            steps=self._steps,
        )
        if self._ahead is not None:
            self._results = CompleteSteps(self._ahead.on_step, self._groups, self._steps)
            self._ahead.interrupt.add_done_callback(self._answered.put)
        elif self._subscriber is not None:
            self._results = PartialResults(self._subscriber, scheduler.num_queued, len(capacities))
            self._most_unreported = self._results.part_rows
        self._assign()
        while self._calls:
            call = self._answered.get()
            if call in self._calls:
                self._handle(call)
            else:
                self._stop()
        used = [rank for rank in scheduler.ranks if rank in self._used]
        calls = {rank: self._engines.submit(rank, "finish_session") for rank in used}
        finished = [batch for batch in self._successes(calls, self._check_finished).values() if batch is not None]
        for rollouts in finished:
            # Some finished before their engine was asked to preempt them, and were never reported.
            self._partial.discard(self._groups.rows_of(rollouts.keys).tolist())
        return [*(self._results.delivered if self._results else []), *finished, *self._partial.returned()]

    def _check_finished(self, rank: int, rollouts: Rollouts | None) -> None:
        """Raise EngineError unless an engine returns all rows that it has reported as finished, each once."""
        delivered = self._results.delivered if self._results else []
        taken = {row for part in delivered for row in self._groups.rows_of(part.keys).tolist()}
        finished = set(self._scheduler.finished_rows(rank)) - taken
        self._groups.check(rollouts, finished, also=self._scheduler.running_rows(rank))

    def _assign(self) -> None:
        for rank, rows in self._scheduler.assign().items():
            self._advance(rank, rows)

    def _advance(self, rank: int, rows: Sequence[int]) -> None:
        """Have an engine start these rows, and report when some are finished, or all with no more rows in the queue."""
        scheduler = self._scheduler
        report_at = len(scheduler.running_rows(rank))
        if scheduler.num_queued or self._ahead:
            report_at = max(1, min(scheduler.capacity(rank).sequences // _REPORTS, report_at // _LAST_REPORTS))
        if self._most_unreported:
            report_at = min(report_at, self._most_unreported)
        partial = self._partial.of_rows(rows)
        partial_argument = [] if partial is None else [SharedBatch(partial).slice(np.arange(len(partial)))]
        self._call("advance", rank, rows, report_at, *partial_argument)
        self._used.add(rank)

    def _call(self, method: _Method, rank: int, rows: Sequence[int], *arguments: Any) -> "Future[Any]":
        call = self._engines.submit(rank, method, pack_rows(rows), *arguments)
        self._calls[call] = (method, rank, rows)
        if method == "advance":
            self._advancing[rank] += 1
        # Each answer costs the same, however many engines have not answered.
        call.add_done_callback(self._answered.put)
        return call

    def _handle(self, call: "Future[Any]") -> None:
        """Handle an engine's answer, and call engines that have something to do now."""
        method, rank, rows = self._calls.pop(call)
        if method == "advance":
            self._advancing[rank] -= 1
        self._preempting.pop(call, None)
        if rank in self._failures:
            return
        try:
            result = call.result()
            if method == "take_rollouts":
                self._groups.check(result, rows)
        except EngineError as error:
            self._handle_failure(rank, error)
            return
        if method == "advance":
            self._handle_progress(rank, result)
        elif method == "preempt":
            self._handle_preempted(rank, result)
        elif self._results:
            self._results.deliver(rank, result)
        if not self._is_stopping:
            self._assign()
            if method == "advance" and self._scheduler.running_rows(rank) and not self._advancing[rank]:
                self._advance(rank, [])
        elif method == "advance":
            self._to_stop_again.add(rank)
        if rank in self._to_stop_again and all(rank != other for other, _ in self._preempting.values()):
            self._to_stop_again.discard(rank)
            self._preempt(rank, self._scheduler.running_rows(rank))

    def _handle_preempted(self, rank: int, rollouts: Rollouts | None) -> None:
        if rollouts is None:
            self._scheduler.preempted(rank, [], [])
            return
        rows = self._groups.rows_of(rollouts.keys).tolist()
        self._partial.add(rank, rows, rollouts)
        self._scheduler.preempted(rank, rows, rollouts.response_ids.lengths.tolist())

    def _handle_progress(self, rank: int, progress: Any) -> None:
        finished, lengths = (np.frombuffer(part, np.int32).tolist() for part in (progress.rows, progress.lengths))
        self._scheduler.finished(rank, finished, lengths, progress.decode_steps)
        self._partial.discard(finished)
        self._groups.done[finished] = True
        if self._is_stopping:
            return
        for other, rows in (self._results.due(rank, finished) if self._results else {}).items():
            self._call("take_rollouts", other, rows)
        self._preempt(*self._scheduler.preempt(rank))

    def _stop(self) -> None:
        """Preempt all that is still being generated, and start nothing more."""
        self._is_stopping = True
        for rank in self._scheduler.ranks:
            self._preempt(rank, self._scheduler.running_rows(rank))

    def _preempt(self, rank: int, rows: Sequence[int]) -> None:
        """Have an engine preempt those of the rows that it was not asked to preempt already."""
        leaving = {row for other, its_rows in self._preempting.values() if other == rank for row in its_rows}
        if rows := [row for row in rows if row not in leaving]:
            self._preempting[self._call("preempt", rank, rows)] = rank, frozenset(rows)

    def _handle_failure(self, rank: int, error: EngineError) -> None:
        """Queue all rows of a failed engine again. The rollouts that it has returned are lost with its process."""
        self._note_failure(rank, error)
        self._groups.done[self._scheduler.finished_rows(rank)] = False
        self._partial.discard_engine(rank)
        self._scheduler.engine_failed(rank, self._partial.lengths)
        if not self._is_stopping:
            self._assign()

    def _note_failure(self, rank: int, error: EngineError) -> None:
        if isinstance(error, EnvironmentFailedError):
            raise error
        self._failures[rank] = error
        if self._results:
            self._results.discard_engine(rank)

    def _successes(
        self, calls: "dict[int, Future[Any]]", check: Callable[[int, Any], None] = lambda rank, result: None
    ) -> dict[int, Any]:
        """Return the results of the engines that do not fail, and note the failures of the others.

        An engine fails too if ``check`` raises EngineError for its result.
        """
        results: dict[int, Any] = {}
        for rank, call in calls.items():
            try:
                result = call.result()
                check(rank, result)
                results[rank] = result
            except EngineError as error:
                self._note_failure(rank, error)
        return results
