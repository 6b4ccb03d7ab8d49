"""Samples in the object stores of several hosts, none of which runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import Logprobs, Packed, Pairs, Prompts, Rewards, Selection, Sequences
from rlflow.errors import EngineError
from rlflow.runtime.objects.host_shares import divide_by_host, join_outputs, without_other_blocks
from rlflow.runtime.objects.store import StoredColumn, block_for, blocks_of
from tests.helpers import pairs, rollouts, sequences


def column(blocks: list[tuple[str, list[int]]], dtype: Any = np.int32) -> StoredColumn:
    """Return a column with a block on each host that is named, whose rows have these lengths."""
    parts = []
    for host, lengths in blocks:
        block = block_for(object(), host, sum(lengths), np.dtype(dtype).str)
        parts.append(StoredColumn.of(block, np.array(lengths, np.int64)))
    joined = Packed.concatenate(parts)
    assert isinstance(joined, StoredColumn)
    return joined


def on_hosts(hosts: list[str], lengths: list[int], group_size: int = 1) -> Sequences:
    """Return samples with one response of such a length on each of the hosts; all prompts are on ``data``."""
    count = len(hosts)
    keys = np.array([[0, row // group_size, row % group_size] for row in range(count)], np.int64)
    return Sequences(
        keys=keys,
        prompt_ids=column([("data", [2] * count)]),
        response_ids=column([(host, [length]) for host, length in zip(hosts, lengths, strict=True)]),
    )


def lengths_of(of: Any) -> Rewards:
    return Rewards(values=(of.keys[:, 1] * 1000 + of.response_ids.lengths).astype(np.float32))


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=20))
def test_each_sample_is_processed_on_its_host_and_comes_back_in_its_place(places: list[tuple[str, int]]) -> None:
    hosts, lengths = [host for host, _ in places], [length for _, length in places]
    samples = on_hosts(hosts, lengths)
    shares = divide_by_host({"rollouts": samples, "rewards": lengths_of(samples)}, "sample")
    assert {share.host for share in shares} == set(hosts)
    for share in shares:
        part: Any = share.inputs["rollouts"]
        assert [hosts[row] for row in share.units] == [share.host] * len(share.units)
        assert part.response_ids.lengths.tolist() == [lengths[row] for row in share.units]
        assert {block.host for block in part.response_ids.blocks} == {share.host}
        assert len(share.inputs["rewards"]) == len(share.units)
    joined: Any = join_outputs(shares, [lengths_of(share.inputs["rollouts"]) for share in shares])
    assert joined.values.tolist() == lengths_of(samples).values.tolist()


def test_a_prompt_is_processed_where_most_tokens_of_its_responses_are() -> None:
    """The first has 5 tokens on a and 3 on b, the second 2 and 8, the third all of its tokens on c."""
    samples = on_hosts(["a", "b", "a", "b", "b", "a", "c", "c", "c"], [3, 3, 2, 4, 4, 2, 1, 1, 1], group_size=3)
    chosen = Selection(chosen=np.array([True, False, True]))
    shares = divide_by_host({"rollouts": samples, "chosen": chosen}, "group")
    assert {share.host: share.units.tolist() for share in shares} == {"a": [0], "b": [1], "c": [2]}
    parts: list[Any] = [share.inputs["rollouts"] for share in shares]
    assert [part.keys[:, 1].tolist() for part in parts] == [[0] * 3, [1] * 3, [2] * 3]
    outputs = [lengths_of(part) for part in parts]
    assert join_outputs(shares, outputs).values.tolist() == lengths_of(samples).values.tolist()  # type: ignore[attr-defined]


def test_an_output_with_a_row_for_each_prompt() -> None:
    samples = on_hosts(["a", "a", "b", "b", "a", "a"], [1] * 6, group_size=2)
    shares = divide_by_host({"rollouts": samples}, "group")
    chosen = {"a": [True, False], "b": [True]}
    outputs = [Selection(chosen=np.array(chosen[share.host])) for share in shares]
    joined: Any = join_outputs(shares, outputs)
    assert joined.chosen.tolist() == [True, True, False]


def test_an_output_with_other_rows_is_refused() -> None:
    shares = divide_by_host({"rollouts": on_hosts(["a", "b", "b"], [1] * 3)}, "sample")
    outputs = [Selection(chosen=np.zeros(1, np.bool_)) for _ in shares]
    said = r"expected equally many rows for each sample or prompt, got 1, 0\.5 on average .* Fix: .*'batch'"
    with pytest.raises(EngineError, match=said):
        join_outputs(shares, outputs)


def test_the_two_responses_of_a_pair_stay_together() -> None:
    on = [("a", 3), ("b", 1), ("b", 2), ("b", 2), ("a", 1), ("c", 4)]
    responses = column([(host, [length]) for host, length in on])
    both = Pairs(**{**vars(pairs(3)), "response_ids": responses})
    units = {share.host: share.units.tolist() for share in divide_by_host({"pairs": both}, "sample")}
    assert units == {"a": [0], "b": [1], "c": [2]}


def test_what_is_not_divided() -> None:
    """Samples in this process, inputs with other rows, numbers alone, and groups of several sizes."""
    samples = on_hosts(["a", "b"], [1, 2])
    prompts = Prompts(keys=samples.keys[:1], ids=Packed.from_rows([[1]], np.int32), rows=({},))
    uneven = on_hosts(["a", "b", "a", "b", "a"], [1] * 5, group_size=2)
    assert divide_by_host({"rollouts": uneven}, "group") == []
    for inputs in (
        {"rollouts": rollouts(sequences([3], [[1, 2]]))},
        {"rollouts": samples, "prompts": prompts},
        {"rollouts": samples, "number": 3},
        {"rewards": lengths_of(samples)},
        {"rollouts": samples.take(np.zeros(0, np.int64))},
    ):
        assert divide_by_host(inputs, "sample") == []


def test_a_share_names_only_the_blocks_that_it_reads() -> None:
    """Two hosts divide 40 blocks into 20 each. Columns with rows of the same lengths share one description of them."""
    hosts = ["a", "b"] * 20
    samples = on_hosts(hosts, [3] * 40)
    logprobs = StoredColumn([block_for(object(), host, 3, "<f4") for host in hosts], samples.response_ids.spans)  # type: ignore[attr-defined]
    shares = divide_by_host({"rollouts": samples, "reference": Logprobs(values=logprobs)}, "sample")
    for share in shares:
        assert len(blocks_of(share.inputs["rollouts"])) == 20 + 1
        assert len(blocks_of(share.inputs["reference"])) == 20
    short: Any = without_other_blocks(samples.take(np.array([7, 3])))
    assert short.response_ids.spans.block.tolist() == [1, 0]
    assert [block.host for block in short.response_ids.blocks] == ["b", "b"]
