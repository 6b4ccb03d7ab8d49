"""Finished rollouts that leave a generation before its end, in parts for the nodes that work on them."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlflow.batch import Rollouts
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
        self._delivered = [each for each in self._delivered if each[0] != rank]
        self._subscriber.discard_engine(rank)
