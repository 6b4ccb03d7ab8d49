"""The bytes that batches have in the stores, counted while this process refers to them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlflow.batch import Logprobs, Rewards
from rlflow.runtime.objects.store import StoredColumn, block_for
from rlflow.runtime.objects.store_usage import StoreUsage, count_towards, current_edge

MIB = 2**20


class Reference:
    """A reference of Ray's."""


def batch_of(mib: int, host: str = "a") -> Logprobs:
    """Return a batch of one row that lies in the store of a host."""
    block = block_for(Reference(), host, mib * MIB // 4, "<f4")
    return Logprobs(values=StoredColumn.of(block, np.array([block.count])))


def test_blocks_count_once_and_while_they_are_referenced() -> None:
    usage = StoreUsage({"a": "host-0", "b": "host-1"})
    batch = batch_of(4)
    usage.add(batch, "prompts")
    usage.add(batch, "rollouts")
    assert usage.used == {"host-0": 4 * MIB, "host-1": 0}
    part = batch.take(np.array([0]))
    del batch
    assert usage.used["host-0"] == 4 * MIB
    more = batch_of(2)
    usage.add(more, "")
    del part
    assert usage.used["host-0"] == 2 * MIB
    assert usage.peaks == {"host-0": 6 * MIB, "host-1": 0}
    assert usage.take_edge_bytes() == {"prompts": 4 * MIB, "other": 2 * MIB}
    assert usage.take_edge_bytes() == {}


def test_results_without_columns_are_not_counted() -> None:
    usage = StoreUsage({"a": "host-0"})
    for result in (None, 0.5, Rewards(values=np.ones(2, np.float32))):
        usage.add(result, "rewards")
    assert usage.take_edge_bytes() == {}


def test_a_cycle_that_the_garbage_collector_finds_while_the_lock_is_held() -> None:
    usage = StoreUsage({"a": "host-0"})
    batch: Any = batch_of(8)
    usage.add(batch, "rollouts")
    with usage._lock:
        del batch
    assert usage.used == {"host-0": 0}


def test_many_threads_lose_nothing() -> None:
    usage = StoreUsage({"a": "host-0"})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: usage.add(batch_of(1), "rollouts"), range(400)))
    assert usage.used == {"host-0": 0}
    assert usage.take_edge_bytes() == {"rollouts": 400 * MIB}
    assert MIB <= usage.peaks["host-0"] <= 8 * MIB


def test_an_edge_is_named_within_its_context() -> None:
    with count_towards("evaluation"), count_towards("rollouts"):
        assert current_edge() == "evaluation/rollouts"
    assert current_edge() == ""
