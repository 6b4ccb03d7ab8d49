"""Attention over packed rows: the two ways to it give the same."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from rlflow.engines.causal_lm import attention
from rlflow.engines.causal_lm.attention import PackedLayout, unpadded
from rlflow.engines.causal_lm.packing import Stream, pack
from rlflow.engines.sharded.ulysses import shared
from tests.helpers import sequences

GIVEN = sequences([5, 2, 9, 1], [[4, 3, 1], [2], [20, 17], [1]])
CPU = torch.device("cpu")


def one_row_after_another(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    **options: Any,
) -> Tensor:
    """What the kernel for GPUs does, [W, H, D]."""
    assert options.pop("window_size") == (-1, 0)
    assert query_ends.dtype == torch.int32
    assert query_ends.equal(key_ends)
    assert longest_query == longest_key == int(query_ends.diff().max())
    assert int(query_ends[-1]) == len(query) == len(key) == len(value)
    rows = []
    for start, end in pairwise(query_ends.tolist()):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        rows.append(scaled_dot_product_attention(q, k, v, is_causal=True, **options)[0].transpose(0, 1))
    return torch.cat(rows)


def attended(stream: Stream, heads: int, key_heads: int) -> tuple[Tensor, list[Tensor]]:
    """And the gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, len(stream.ids), 8) for count in (heads, key_heads, key_heads)]
    query, key, value = given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    out = PackedLayout(stream, CPU).attend(0, query, key, value, 0.3)
    return out, list(torch.autograd.grad(out.square().sum(), given))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 8])
def test_rows_of_any_length_are_blocks_of_like_length(
    monkeypatch: pytest.MonkeyPatch, ranks: int, key_heads: int
) -> None:
    stream = shared(pack(GIVEN.prompt_ids, GIVEN.response_ids), ranks)
    blocks, of_blocks = attended(stream, 4, key_heads)
    monkeypatch.setattr(attention, "takes_rows", lambda value: True)
    monkeypatch.setattr(attention, "varlen_attn", one_row_after_another)
    rows, of_rows = attended(stream, 4, key_heads)
    tokens = torch.from_numpy(np.unique(np.concatenate([block.ravel() for block in stream.blocks])))
    assert torch.allclose(rows[:, tokens], blocks[:, tokens], atol=1e-6)
    for one, other in zip(of_rows, of_blocks, strict=True):
        assert torch.allclose(one[:, :, tokens], other[:, :, tokens], atol=1e-5)


def test_without_padding_there_are_the_tokens_of_all_rows() -> None:
    stream = pack(GIVEN.prompt_ids, GIVEN.response_ids)
    places, owners, lengths = unpadded(stream)
    expected = GIVEN.prompt_ids.lengths + GIVEN.response_ids.lengths - 1
    assert sorted(lengths) == sorted(expected)
    assert len(places) == expected.sum()
    assert (places[owners] == np.arange(len(stream.ids))).all()
    for start, end in pairwise([0, *np.cumsum(lengths)]):
        assert stream.positions[places[start:end]].tolist() == list(range(end - start))


@pytest.mark.parametrize("key_heads", [2, 4])
def test_its_memory_grows_with_tokens_and_not_with_their_square(key_heads: int) -> None:
    given = sequences([400], [[400]])
    stream = pack(given.prompt_ids, given.response_ids)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        attended(stream, 4, key_heads)
    largest = max(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    assert largest < 800 * 800 * 4
