"""The experts of tokens as records: written and read, joined, and kept where tokens are read again."""

from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed
from rlflow.batch.routing import extend_routing, from_records, keep_first, pack_routing, to_records
from tests.helpers import sequences


def records(*experts: int) -> Any:
    """Return records of one layer, with one expert of eight for each token."""
    return to_records(np.array(experts)[:, None, None], 8)


def numbers(routing: Any) -> list[int]:
    return [int(number) for number in from_records(routing, 8, 1).ravel()]


@pytest.mark.parametrize(("num_experts", "size"), [(8, 6), (256, 6), (257, 12)])
def test_a_number_has_as_many_bytes_as_it_needs(num_experts: int, size: int) -> None:
    experts = np.random.default_rng(0).integers(0, num_experts, (5, 3, 2))
    experts[0, 0, 0] = num_experts - 1
    routing = to_records(experts, num_experts)
    assert routing.dtype.itemsize == size
    assert (from_records(routing, num_experts, 3) == experts).all()


def test_a_token_that_is_read_again_keeps_its_experts() -> None:
    assert numbers(keep_first(records(0, 1, 2, 3), records(7, 7), end=3)) == [0, 7, 7, 3]
    assert numbers(keep_first(records(0, 1), None, end=1)) == [0, 1]
    assert numbers(keep_first(None, records(6, 7), end=2)) == [6, 7]


def test_later_calls_continue_what_is_known() -> None:
    known = records(0, 1, 2)
    assert numbers(extend_routing(known, records(7, 7, 3, 4), end=5)) == [0, 1, 2, 3, 4]
    assert numbers(extend_routing(known, records(4), end=5)) == [0, 1, 2]
    assert numbers(extend_routing(None, records(5, 6), end=2)) == [5, 6]
    assert extend_routing(None, None, end=2) is None


def test_batches_without_experts_are_joined_with_others() -> None:
    one, other = (sequences([2], [[3]]) for _ in range(2))
    routing = pack_routing([None, records(1, 2, 3, 4)])
    assert routing is not None
    batch = type(one)(**vars(one) | {"routing": routing.take(np.array([1]))})
    joined = type(one).concatenate([other, batch, other]).routing
    assert isinstance(joined, Packed)
    assert joined.lengths.tolist() == [0, 4, 0]
    assert numbers(joined.values) == [1, 2, 3, 4]
    assert type(one).concatenate([one, other]).routing is None
