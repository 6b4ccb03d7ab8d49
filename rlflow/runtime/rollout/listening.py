"""Parts of what is written, for whoever works on them while the rest is being written."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from rlflow.batch import Rollouts

# What an engine writes is handed over in about so many parts.
_PARTS = 8
# Seconds of a generation before the first of them: what is shorter is worth no messages.
_BEFORE_S = 1.0


class Listener(Protocol):
    """Whoever works on them."""

    def add(self, rank: int, part: Rollouts) -> None:
        """Samples that an engine is done with, each in one part at most."""

    def lose(self, rank: int) -> None:
        """All that this engine has written is lost, and will be written anew by others."""


class Listening:
    """To one generation."""

    def __init__(self, listener: Listener, rows: int, num_engines: int) -> None:
        """``rows`` are to be written by all engines together."""
        self.size = max(1, -(-rows // (_PARTS * max(1, num_engines))))
        """Rows of a part."""
        self._listener = listener
        self._from = time.monotonic() + _BEFORE_S
        self._done: dict[int, list[int]] = defaultdict(list)
        self._parts: list[tuple[int, Rollouts]] = []

    @property
    def parts(self) -> list[Rollouts]:
        """That are not lost."""
        return [part for _, part in self._parts]

    def due(self, rank: int, ended: Sequence[int]) -> list[int]:
        """Rows that this engine is to hand over, now that it has ended these; none as long as they are few."""
        done = self._done[rank]
        done += ended
        if len(done) < self.size or time.monotonic() < self._from:
            return []
        return self._done.pop(rank)

    def add(self, rank: int, part: Rollouts) -> None:
        """What it has handed over."""
        self._parts.append((rank, part))
        self._listener.add(rank, part)

    def lose(self, rank: int) -> None:
        self._parts = [each for each in self._parts if each[0] != rank]
        self._listener.lose(rank)
