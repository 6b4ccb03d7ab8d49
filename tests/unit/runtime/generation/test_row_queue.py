"""The order of queued samples, compared with a sort of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.runtime.generation.row_queue import RowQueue

NUM_ROWS = 8


def drained(queue: RowQueue) -> list[int]:
    rows = []
    while queue:
        rows.append(queue.first)
        queue.pop()
    return rows


@pytest.mark.slow
@given(
    ranks=st.lists(st.integers(0, 3), min_size=NUM_ROWS, max_size=NUM_ROWS),
    order=st.permutations(range(NUM_ROWS)),
    num_new=st.integers(0, NUM_ROWS),
    num_first=st.integers(0, NUM_ROWS),
    lengths=st.lists(st.integers(1, 5), min_size=NUM_ROWS, max_size=NUM_ROWS),
)
def test_smaller_ranks_then_new_rows_then_the_shortest(
    ranks: list[int], order: list[int], num_new: int, num_first: int, lengths: list[int]
) -> None:
    """Some partial rollouts are there from the start, the others come one by one."""
    new, partial = order[:num_new], order[num_new:]
    queue = RowQueue(np.array(ranks))
    queue.set_new(np.array(new, np.int64))
    first = np.array(partial[:num_first], np.int64)
    queue.set_partial(first, np.array(lengths)[first])
    for row in partial[num_first:]:
        queue.add_partial(row, lengths[row])
    assert len(queue) == NUM_ROWS
    assert queue.num_new == num_new
    assert queue.new_rows.tolist() == sorted(new)
    expected = sorted(new, key=lambda row: ranks[row])
    expected += sorted(partial, key=lambda row: (lengths[row], row))
    assert drained(queue) == sorted(expected, key=lambda row: ranks[row])


def test_a_new_order_keeps_what_is_left() -> None:
    queue = RowQueue(np.zeros(4, np.int64))
    queue.set_new(np.array([2, 0, 3, 1]))
    queue.pop()
    queue.set_new(queue.new_rows[::-1])
    assert drained(queue) == [3, 1, 0]
