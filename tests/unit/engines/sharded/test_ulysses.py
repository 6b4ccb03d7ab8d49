"""Attention that ranks share, with all ranks in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from rlflow.engines.causal_lm.attention import PackedLayout, torch_varlen_attention
from rlflow.engines.causal_lm.packing import pack, pad
from rlflow.engines.sharded.ulysses import UlyssesLayout, shard_stream
from tests.helpers import sequences

GIVEN = sequences([5, 2, 4], [[4, 3, 1], [2], [1, 6]])
CPU = torch.device("cpu")


class Exchange:
    """An all-to-all between threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._pieces: list[Tensor] = [torch.empty(0)] * size

    def of(self, rank: int, pieces: Tensor) -> Tensor:
        self._pieces[rank] = pieces
        self._barrier.wait()
        received = torch.stack([theirs[rank] for theirs in self._pieces])
        self._barrier.wait()
        return received


@pytest.mark.parametrize(
    ("size", "heads", "key_heads"), [(2, 4, 2), (2, 2, 1), (4, 4, 2), (4, 8, 8), (6, 6, 3), (3, 6, 3)]
)
def test_shared_attention_is_whole_attention(size: int, heads: int, key_heads: int) -> None:
    stream = pack(GIVEN.prompt_ids, GIVEN.response_ids)
    tokens = len(pad(stream, size).ids)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, count, tokens, 8, generator=draw) for count in (heads, key_heads, key_heads)]
    whole = [x[:, :, : len(stream.ids)].clone().requires_grad_() for x in inputs]
    query, key, value = whole
    expected = PackedLayout(stream, CPU, torch.float32).attend(None, query, key, value, 0.3, torch_varlen_attention)
    torch.autograd.backward(expected.square().sum())

    theirs = [x.clone().requires_grad_() for x in inputs]
    exchange = Exchange(size)

    def attend(rank: int) -> Tensor:
        layout = UlyssesLayout(stream, CPU, torch.float32, size, lambda pieces: exchange.of(rank, pieces))
        query, key, value = (x[:, :, rank::size] for x in theirs)
        out: Tensor = layout.attend(None, query, key, value, 0.3, torch_varlen_attention)
        return out

    with ThreadPoolExecutor(size) as ranks:
        parts = list(ranks.map(attend, range(size)))
    out = torch.stack(parts, dim=2).flatten(1, 2)[:, : len(stream.ids)]
    assert torch.allclose(out, expected, atol=1e-6)
    torch.autograd.backward(out.square().sum())
    for ours, alone in zip(theirs, whole, strict=True):
        assert ours.grad is not None
        assert alone.grad is not None
        assert torch.allclose(ours.grad[:, :, : len(stream.ids)], alone.grad, atol=1e-5)
        assert not ours.grad[:, :, len(stream.ids) :].any()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 64])
def test_parts_are_the_whole(size: int) -> None:
    stream = pack(GIVEN.prompt_ids, GIVEN.response_ids)
    parts = [shard_stream(stream, rank, size) for rank in range(size)]
    assert len({len(part.ids) for part, _ in parts}) == 1
    for name in ("ids", "positions"):
        joined = np.stack([getattr(part, name) for part, _ in parts], axis=1).ravel()
        assert joined[: len(stream.ids)].tolist() == getattr(stream, name).tolist()
    assert sorted(np.concatenate([tokens for _, tokens in parts])) == list(range(len(stream.predictors)))
    for part, tokens in parts:
        assert part.ids[part.predictors].tolist() == stream.ids[stream.predictors[tokens]].tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_as_many_predictors(size: int) -> None:
    given = sequences([60], [[50]])
    stream = pack(given.prompt_ids, given.response_ids)
    counts = [len(shard_stream(stream, rank, size)[1]) for rank in range(size)]
    assert max(counts) - min(counts) <= 1
