"""The concurrent engines of a role over a run: which of them can generate, and what each did when."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import median
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import is_done
from rlflow.errors import EngineError
from rlflow.runtime.generation.dispatcher import GenerationRequest, LaterSteps, dispatch
from rlflow.runtime.generation.engine_state import AllEnginesFailedError
from rlflow.runtime.protocols import Subscriber, Workers

# How often one generation may replace all engines after all have failed.
_MAX_RESTARTS = 2
# An engine is slow whose decoding steps take so many times as long as those of the others, measured in at least so many
# seconds of a step.
_SLOW_FACTOR, _MIN_SECONDS = 5.0, 3

Line = dict[str, Any]
"""A line of ``engines.jsonl``: a second of an engine, or its failure."""


class EngineGroup:
    """Generation by the engines of one role, of which some may fail."""

    def __init__(self, role: str, engines: Workers, resync_weights: Callable[[], None]) -> None:
        """Take the engines of a role. ``resync_weights`` syncs the current weights to all of them.

        It calls ``weights_synced`` when it has done so.
        """
        self._role, self._engines, self._resync_weights = role, engines, resync_weights
        self._without_weights: set[int] = set()
        self._follows_another = False
        self._previous_lengths: dict[Sampling, NDArray[np.float64]] = {}
        self._activity: list[Line] = []
        self._failures: list[Line] = []
        self._subscriber: Subscriber | None = None
        self._generating = Lock()

    def wait_until_idle(self) -> None:
        """Wait until the generation in progress has ended, if there is one."""
        with self._generating:
            pass

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Stream finished samples to the subscriber within the context."""
        self._subscriber = subscriber
        try:
            yield
        finally:
            self._subscriber = None

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Generate ``group_size`` rollouts for each prompt and return them in the order of keys. Raises EngineError.

        The samples of an engine that fails go to the others. The engine is replaced, and the new one generates once it
        has the weights: those of the next sync, or the current ones at once if no other engine is left.
        """
        request = GenerationRequest(prompts=prompts, sampling=sampling, subscriber=self._subscriber)
        with self._generating:
            rollouts = self._generate(request)
        assert rollouts is not None
        return rollouts

    def generate_ahead(
        self, prompts: Prompts, sampling: Sampling, partial: Rollouts | None, ahead: LaterSteps
    ) -> Rollouts | None:
        """Resume ``partial`` and start others, until all are done or the generation is interrupted.

        Engines that fail are replaced as in ``generate``. Returns None if it is interrupted before it has any tokens.
        Raises EngineError.
        """
        request = GenerationRequest(
            prompts=prompts, sampling=sampling, partial=partial, ahead=ahead, subscriber=self._subscriber
        )
        with self._generating:
            return self._generate(request)

    def _generate(self, request: GenerationRequest) -> Rollouts | None:
        sampling = request.sampling
        previous = self._previous_lengths.get(sampling)
        for restarts in range(_MAX_RESTARTS + 1):
            ranks = self._ranks_with_weights()
            try:
                rollouts, failures = dispatch(self._engines, ranks, request, previous)
                break
            except AllEnginesFailedError as error:
                if restarts == _MAX_RESTARTS:
                    raise
                self._note_end(ranks, error.failures)
                # The partial rollouts may have been in the processes that failed.
                request = replace(request, partial=None)
        if rollouts is not None and (done := is_done(rollouts, sampling)).any():
            self._previous_lengths[sampling] = rollouts.response_ids.lengths[done].astype(np.float64)
        self._note_end(ranks, failures)
        return rollouts

    def weights_synced(self) -> None:
        """Note that all engines have the same weights again."""
        self._without_weights.clear()
        self._follows_another = True

    def take_activity(self) -> list[Line]:
        """Return a line for each second of each engine since the last call."""
        return _take(self._activity)

    def take_failures(self) -> list[Line]:
        """Return a line for each engine that failed and was replaced since the last call."""
        return _take(self._failures)

    def _ranks_with_weights(self) -> list[int]:
        """Return the engines that have the current weights; if none has, all get them first."""
        if len(self._without_weights) == len(self._engines):
            self._resync_weights()
        return [rank for rank in range(len(self._engines)) if rank not in self._without_weights]

    def _note_end(self, ranks: Sequence[int], failures: Mapping[int, EngineError]) -> None:
        """Note the engines' activity in a generation, and replace those that failed."""
        self._note_activity([rank for rank in ranks if rank not in failures])
        if failures:
            self._failures.extend({"engine": rank, "failed": str(error)} for rank, error in failures.items())
            self._engines.restart(sorted(failures))
            # If the role follows another, a new engine has the weights from before training.
            self._without_weights |= set(failures) if self._follows_another else set()

    def _note_activity(self, ranks: Sequence[int]) -> None:
        calls = {rank: self._engines.submit(rank, "take_activity") for rank in ranks}
        wait(calls.values())
        for rank, call in calls.items():
            # The rollouts have arrived, so an engine that has failed since does not matter here.
            seconds = [] if call.exception() else call.result()
            self._activity.extend({"role": self._role, "engine": rank, **asdict(second)} for second in seconds)


def _take(lines: list[Line]) -> list[Line]:
    """Remove and return the lines so far. Another thread may add lines meanwhile."""
    taken = list(lines)
    del lines[: len(taken)]
    return taken


def summarize_activity(lines: Sequence[Line]) -> dict[str, float]:
    """Return the metrics of one role's generations in a step."""
    engines = sorted({line["engine"] for line in lines})
    busy = [sum(line["seconds"] for line in lines if line["engine"] == engine) for engine in engines]
    tokens = sum(line["tokens"] for line in lines)
    longest = max(busy, default=0.0)
    if not longest:
        return {}
    return {
        "engines/tokens_per_second": tokens / sum(busy),
        "engines/idle": 1 - sum(busy) / (longest * len(busy)),
        "engines/idle_most": 1 - min(busy) / longest,
        "engines/last": engines[busy.index(longest)],
        "engines/cache_most": max(line["cache"] for line in lines),
        "engines/preemptions": sum(line["preemptions"] for line in lines),
    }


def slow_engines(lines: Sequence[Line]) -> dict[int, float]:
    """Return how many times as long a decoding step takes each slow engine as the median of the others.

    A second in which an engine ran out of samples does not count: how many it had is not known.
    """
    steps: dict[int, list[float]] = {}
    for line in lines:
        if line["running"] and line["tokens"]:
            steps.setdefault(line["engine"], []).append(line["seconds"] * line["running"] / line["tokens"])
    medians = {engine: median(seconds) for engine, seconds in steps.items() if len(seconds) >= _MIN_SECONDS}
    factors = {
        engine: seconds / median(others)
        for engine, seconds in medians.items()
        if (others := [other for name, other in medians.items() if name != engine])
    }
    return {engine: factor for engine, factor in factors.items() if factor >= _SLOW_FACTOR}
