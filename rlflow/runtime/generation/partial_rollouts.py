"""The partial rollouts of a generation: those that it started with, and those that engines return on preemption."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Rollouts
from rlflow.engines.group_progress import GroupProgress


class PartialRollouts:
    """The partial rollout of each unfinished sample that has one, by row ``prompt * group_size + sample``."""

    def __init__(self, groups: GroupProgress) -> None:
        """Start with the partial rollouts in ``groups``."""
        self._groups = groups
        self._returned: dict[int, tuple[int, Rollouts, int]] = {}
        """The engine that returned a row's partial rollout, the batch that it is in, and its row in the batch."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the generated tokens of each row [R]."""
        lengths = self._groups.initial_lengths.copy()
        for row, (_, batch, batch_row) in self._returned.items():
            lengths[row] = batch.response_ids.lengths[batch_row]
        return lengths

    def add(self, rank: int, rows: Sequence[int], batch: Rollouts) -> None:
        """Add the partial rollouts that an engine has returned."""
        lengths = batch.response_ids.lengths
        self._returned |= {row: (rank, batch, batch_row) for batch_row, row in enumerate(rows) if lengths[batch_row]}

    def discard(self, rows: Sequence[int]) -> None:
        """Discard the partial rollouts of rows that are finished."""
        for row in rows:
            self._returned.pop(row, None)

    def discard_engine(self, rank: int) -> None:
        """Discard the partial rollouts that a failed engine has returned, since they were in its process."""
        self._returned = {row: partial for row, partial in self._returned.items() if partial[0] != rank}

    def returned(self) -> list[Rollouts]:
        """Return the partial rollouts that engines have returned and that are not finished since."""
        batch_rows: dict[int, list[int]] = defaultdict(list)
        batches: dict[int, Rollouts] = {}
        for _, batch, batch_row in self._returned.values():
            batch_rows[id(batch)].append(batch_row)
            batches[id(batch)] = batch
        return [batch.take(np.array(batch_rows[number])) for number, batch in batches.items()]

    def of_rows(self, rows: Sequence[int]) -> Rollouts | None:
        """Return the partial rollouts of those rows that have one; None when none has."""
        parts = []
        for row in rows:
            if row in self._returned:
                _, batch, batch_row = self._returned[row]
                parts.append(batch.take(np.array([batch_row])))
        first = np.array([self._groups.partial_rows[row] for row in rows if row not in self._returned], np.int64)
        if self._groups.partial is not None and (first >= 0).any():
            parts.append(self._groups.partial.take(first[first >= 0]))
        return Rollouts.concatenate(parts) if parts else None
