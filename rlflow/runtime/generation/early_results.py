"""Finished rollouts that leave a generation before its end: parts for nodes that work on them, or complete steps."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Rollouts
from rlflow.engines.group_progress import GroupProgress
from rlflow.runtime.protocols import Subscriber

# An engine delivers its rollouts in about so many parts.
_PARTS = 8
# Seconds of a generation before the first part: shorter generations are not worth the messages.
_MIN_SECONDS = 1.0


class EarlyResults(Protocol):
    """The finished rows of one generation that engines deliver before its end."""

    @property
    def delivered(self) -> list[Rollouts]:
        """Return the parts of all engines that have not failed."""

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return those that must be delivered now, by engine."""

    def deliver(self, rank: int, part: Rollouts) -> None:
        """Take a part that an engine delivers."""

    def discard_engine(self, rank: int) -> None:
        """Discard the parts of a failed engine."""


class PartialResults:
    """Early results for a subscriber, in parts of about the same size."""

    def __init__(self, subscriber: Subscriber, num_rows: int, num_engines: int) -> None:
        """Deliver to ``subscriber``. All engines together generate ``num_rows``."""
        self.part_rows = max(1, -(-num_rows // (_PARTS * max(1, num_engines))))
        """The rows of a part, at least."""
        self._subscriber = subscriber
        self._start = time.monotonic() + _MIN_SECONDS
        self._finished: dict[int, list[int]] = defaultdict(list)
        self._delivered: list[tuple[int, Rollouts]] = []

    @property
    def delivered(self) -> list[Rollouts]:
        return [part for _, part in self._delivered]

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return those that it must deliver now: none while they are few."""
        finished = self._finished[rank]
        finished += rows
        if len(finished) < self.part_rows or time.monotonic() < self._start:
            return {}
        return {rank: self._finished.pop(rank)}

    def deliver(self, rank: int, part: Rollouts) -> None:
        self._delivered.append((rank, part))
        self._subscriber.receive(rank, part)

    def discard_engine(self, rank: int) -> None:
        self._delivered = [part for part in self._delivered if part[0] != rank]
        self._subscriber.discard_engine(rank)


class CompleteSteps:
    """Early results for training: all rollouts of a step, as soon as the last of them is finished."""

    def __init__(
        self, on_step: Callable[[int, Rollouts], None], groups: GroupProgress, prompt_steps: NDArray[np.int64]
    ) -> None:
        """Deliver the rows that are not done in ``groups``, together with the others of their step, to ``on_step``.

        ``prompt_steps`` [P] are the steps of the prompts.
        """
        self._on_step, self._groups = on_step, groups
        self._step_of = np.repeat(prompt_steps, len(groups.done) // max(1, len(prompt_steps)))
        steps, counts = np.unique(self._step_of[~groups.done], return_counts=True)
        self._num_rows = dict(zip(steps.tolist(), counts.tolist(), strict=True))
        """The rows that each step waits for, from the start. A complete step is removed."""
        self._finished: dict[int, dict[int, int]] = {step: {} for step in self._num_rows}
        """The engine of each finished row, by step."""
        self._requested: set[int] = set()
        self._delivered: list[tuple[int, Rollouts]] = []

    @property
    def delivered(self) -> list[Rollouts]:
        return [part for _, part in self._delivered]

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return all rows of the steps that they complete, by engine."""
        due: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            step = int(self._step_of[row])
            if step not in self._num_rows:
                continue
            finished = self._finished[step]
            finished[row] = rank
            if len(finished) == self._num_rows[step]:
                for other_row in finished.keys() - self._requested:
                    due[finished[other_row]].append(other_row)
                self._requested |= finished.keys()
        return due

    def deliver(self, rank: int, part: Rollouts) -> None:
        """Take a part, and deliver the steps that it completes."""
        self._delivered.append((rank, part))
        for step in np.unique(part.keys[:, 0]).tolist():
            num_delivered = sum(int((rollouts.keys[:, 0] == step).sum()) for rollouts in self.delivered)
            if num_delivered == self._num_rows.get(step):
                del self._num_rows[step], self._finished[step]
                rollouts = self._groups.merge(self.delivered)
                assert rollouts is not None
                self._on_step(step, rollouts.take(np.flatnonzero(rollouts.keys[:, 0] == step)))

    def discard_engine(self, rank: int) -> None:
        """Discard the parts of a failed engine, whose rows others will generate. Complete steps have left."""
        self._delivered = [part for part in self._delivered if part[0] != rank]
        for finished in self._finished.values():
            lost = {row for row, engine in finished.items() if engine == rank}
            self._requested -= lost
            for row in lost:
                del finished[row]
