"""What engines do over a run that take new samples while they write: which of them can, and what each did when."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import is_done
from rlflow.errors import EngineError
from rlflow.runtime.generation import dispatcher as pulling
from rlflow.runtime.generation.dispatcher import AllFailedError, pulled
from rlflow.runtime.generation.partial_results import Listener

# So often in one generation all engines are started anew after all have failed.
_REVIVALS = 2

Line = dict[str, Any]
"""A second of an engine; a line of ``engines.jsonl``."""


class Engines(pulling.Engines, Protocol):
    """They can be replaced."""

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones; the others go on. Raises EngineError."""


class Writing:
    """Generation by the engines of one role, of which some may fail."""

    def __init__(self, role: str, engines: Engines, renew: Callable[[], None]) -> None:
        """``renew`` gives all engines the weights in force, and so calls ``renewed``."""
        self._role, self._engines, self._renew = role, engines, renew
        self._out: set[int] = set()
        self._followed = False
        self._before: dict[Sampling, NDArray[np.float64]] = {}
        self._lines: list[Line] = []
        self._failures: list[Line] = []
        self._listener: Listener | None = None

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """It is told of what is written inside, as soon as that is done."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """``group_size`` rollouts of each prompt, in the order of keys. Raises EngineError.

        The samples of an engine that fails go to the others. It alone is started anew, and writes again when it has the
        weights: those of the next copy, or at once those in force where no other engine is left.
        """
        return self.continue_rollouts(prompts, sampling, None, len(prompts))

    def continue_rollouts(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None, enough: int) -> Rollouts:
        """As ``Continues`` has it; engines that fail as in ``generate``. Raises EngineError."""
        before, listener = self._before.get(sampling), self._listener
        for revival in range(_REVIVALS + 1):
            ranks = self._ranks()
            try:
                rollouts, lost = pulled(self._engines, ranks, prompts, sampling, before, begun, enough, listener)
                break
            except AllFailedError as failure:
                if revival == _REVIVALS:
                    raise
                self._ended(ranks, failure.lost)
                # It was in the keeping of engines that have failed since.
                begun = None
        self._before[sampling] = rollouts.response_ids.lengths[is_done(rollouts, sampling)].astype(np.float64)
        self._ended(ranks, lost)
        return rollouts

    def _ranks(self) -> list[int]:
        """Return the engines that have the weights in force; where none has, all get them first."""
        if len(self._out) == len(self._engines):
            self._renew()
        return [rank for rank in range(len(self._engines)) if rank not in self._out]

    def _ended(self, ranks: Sequence[int], lost: Mapping[int, EngineError]) -> None:
        self._note([rank for rank in ranks if rank not in lost])
        if lost:
            self._failures += [{"engine": rank, "failed": str(error)} for rank, error in lost.items()]
            self._engines.restart(sorted(lost))
            # A new engine has the weights that training began with.
            self._out |= set(lost) if self._followed else set()

    def renewed(self) -> None:
        """All engines have the same weights again."""
        self._out.clear()
        self._followed = True

    def taken_lines(self) -> list[Line]:
        """What the engines did since this was last asked."""
        lines, self._lines = self._lines, []
        return lines

    def taken_failures(self) -> list[Line]:
        """Engines that have been replaced since this was last asked, and why."""
        failures, self._failures = self._failures, []
        return failures

    def _note(self, ranks: Sequence[int]) -> None:
        calls = {rank: self._engines.submit(rank, "take_activity") for rank in ranks}
        wait(calls.values())
        for rank, call in calls.items():
            # What has been written is there, whatever became of the engine since.
            seconds = [] if call.exception() else call.result()
            self._lines += [{"role": self._role, "engine": rank, **asdict(second)} for second in seconds]


def summary(lines: Sequence[Line]) -> dict[str, float]:
    """Of one role's generations in a step, in single numbers."""
    engines = sorted({line["engine"] for line in lines})
    worked = [sum(line["seconds"] for line in lines if line["engine"] == engine) for engine in engines]
    tokens = sum(line["tokens"] for line in lines)
    longest = max(worked, default=0.0)
    if not longest:
        return {}
    return {
        "engines/tokens_per_second": tokens / sum(worked),
        "engines/idle": 1 - sum(worked) / (longest * len(worked)),
        "engines/idle_most": 1 - min(worked) / longest,
        "engines/last": engines[worked.index(longest)],
        "engines/cache_most": max(line["cache"] for line in lines),
        "engines/preemptions": sum(line["preemptions"] for line in lines),
    }
