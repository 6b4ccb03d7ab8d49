"""The queue of samples that no engine has: some were never started, others are partial rollouts.

Samples that were never started are put in another order whenever more is known about lengths, and many at once. Partial
rollouts come one by one. So the former are a sorted array, and the latter a heap.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class RowQueue:
    """Rows in the order in which engines get them: those with a smaller rank first.

    Among equals, rows that were never started come before partial rollouts, and of these the shortest first.
    Shapes: R rows.
    """

    def __init__(self, ranks: Ints) -> None:
        """Start empty. ``ranks`` [R]: the rank of each row."""
        self._ranks = ranks
        self.num_new = 0
        """The number of rows that were never started."""
        self._new: Ints = np.zeros(0, np.int64)
        """The rows that were never started are its last ``num_new``."""
        self._partial: list[tuple[int, int, int]] = []
        """A heap; the row is the last item of each entry."""

    def __len__(self) -> int:
        return self.num_new + len(self._partial)

    @property
    def new_rows(self) -> Ints:
        """Return the rows that were never started, in ascending order."""
        return np.sort(self._new[len(self._new) - self.num_new :])

    def set_new(self, rows: Ints) -> None:
        """Replace the rows that were never started by these, in this order among rows of equal rank."""
        self._new, self.num_new = rows[np.argsort(self._ranks[rows], kind="stable")], len(rows)

    def set_partial(self, rows: Ints, lengths: Ints) -> None:
        """Replace the partial rollouts by these. ``lengths``: the tokens of each."""
        # A sorted list is a heap.
        self._partial = sorted(zip(self._ranks[rows].tolist(), lengths.tolist(), rows.tolist(), strict=True))

    def add_partial(self, row: int, length: int) -> None:
        """Add a partial rollout."""
        heapq.heappush(self._partial, (int(self._ranks[row]), length, row))

    @property
    def first(self) -> int:
        """Return the first row."""
        return int(self._new[-self.num_new]) if self._is_new_first else self._partial[0][-1]

    def pop(self) -> None:
        """Remove the first row."""
        if self._is_new_first:
            self.num_new -= 1
        else:
            heapq.heappop(self._partial)

    @property
    def _is_new_first(self) -> bool:
        if not self.num_new or not self._partial:
            return self.num_new > 0
        return bool(self._ranks[self._new[-self.num_new]] <= self._partial[0][0])
