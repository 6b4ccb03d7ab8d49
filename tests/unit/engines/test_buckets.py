"""Weights in buckets."""

from collections.abc import Iterator

import pytest
import torch

from rlflow.engines.buckets import build_buckets, join_parts, part_name

WEIGHTS = {
    "embedding": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "norm": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "scale": torch.tensor(7.0),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "count": torch.tensor([1, 2], dtype=torch.int64),
}


@pytest.mark.parametrize("most", [1, 64, 130, 2**20])
def test_they_arrive_as_they_left(most: int) -> None:
    arrived = {
        name: tensor.clone() for bucket in build_buckets(WEIGHTS.items(), most) for name, tensor in bucket.tensors()
    }
    assert list(arrived) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_a_bucket_is_bounded() -> None:
    """Aligned to 64 bytes: 48 -> 64, 6 -> 64, 4 -> 64, 24 -> 64, 16."""
    assert [len(bucket.entries) for bucket in build_buckets(WEIGHTS.items(), 130)] == [2, 2, 1]
    assert all(len(bucket.data) <= 130 for bucket in build_buckets(WEIGHTS.items(), 130))


def test_a_tensor_need_not_outlive_the_next() -> None:
    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.zeros(2)
        for value in range(3):
            yield str(value), memory.fill_(value)

    arrived = {name: tensor.tolist() for bucket in build_buckets(reused()) for name, tensor in bucket.tensors()}
    assert arrived == {"0": [0, 0], "1": [1, 1], "2": [2, 2]}


def test_ranks_that_only_gather_have_the_same_buckets_without_data() -> None:
    full, empty = (list(build_buckets(WEIGHTS.items(), 130, copy_data=copy)) for copy in (True, False))
    assert [bucket.entries for bucket in empty] == [bucket.entries for bucket in full]
    assert all(len(bucket.data) == 0 for bucket in empty)


def test_parts_of_a_weight_are_joined() -> None:
    whole = torch.arange(10.0).view(5, 2)
    names = [part_name("large", is_last=is_last) for is_last in (False, False, True)]
    parts = [*zip(names, torch.tensor_split(whole, 3), strict=True), ("small", torch.ones(1))]
    joined = dict(join_parts(iter(parts)))
    assert list(joined) == ["large", "small"]
    assert torch.equal(joined["large"], whole)
