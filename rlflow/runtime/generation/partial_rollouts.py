"""Where what is written of each sample lies that no engine has finished: in what was begun before, or in what an engine
handed over when it put the sample off."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Rollouts
from rlflow.engines.group_progress import GroupProgress


class Begun:
    """Of rows ``prompt * group_size + sample``."""

    def __init__(self, groups: GroupProgress) -> None:
        """``groups.partial``: what was begun before."""
        self._groups = groups
        self._parts: dict[int, tuple[int, Rollouts, int]] = {}
        """The engine that handed a row over, what it handed over then, and the row's place in that."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[R] tokens that are written of each."""
        lengths = self._groups.initial_lengths.copy()
        for row, (_, part, place) in self._parts.items():
            lengths[row] = part.response_ids.lengths[place]
        return lengths

    def add(self, rank: int, rows: Sequence[int], part: Rollouts) -> None:
        """What an engine has handed over."""
        lengths = part.response_ids.lengths
        self._parts |= {row: (rank, part, place) for place, row in enumerate(rows) if lengths[place]}

    def forget(self, rows: Sequence[int]) -> None:
        """They are done."""
        for row in rows:
            self._parts.pop(row, None)

    def lose(self, rank: int) -> None:
        """What this engine handed over: it was in its keeping."""
        self._parts = {row: each for row, each in self._parts.items() if each[0] != rank}

    def new(self) -> list[Rollouts]:
        """What engines have handed over, and is not done."""
        places: dict[int, list[int]] = defaultdict(list)
        parts: dict[int, Rollouts] = {}
        for _, part, place in self._parts.values():
            places[id(part)].append(place)
            parts[id(part)] = part
        return [part.take(np.array(places[number])) for number, part in parts.items()]

    def of(self, rows: Sequence[int]) -> Rollouts | None:
        """What is written of those of the rows that are begun; None where none is."""
        found = [self._parts[row][1].take(np.array([self._parts[row][2]])) for row in rows if row in self._parts]
        places = np.array([self._groups.partial_rows[row] for row in rows if row not in self._parts], np.int64)
        if self._groups.partial is not None and (places >= 0).any():
            found.append(self._groups.partial.take(places[places >= 0]))
        return Rollouts.concatenate(found) if found else None
