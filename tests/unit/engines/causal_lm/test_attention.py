"""Attention over packed rows: the two ways to it give the same."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from rlflow.engines.causal_lm import attention, kernels
from rlflow.engines.causal_lm.attention import (
    PackedLayout,
    VarlenKernel,
    flash_varlen_attention,
    supports_flash,
    torch_varlen_attention,
    unpad,
)
from rlflow.engines.causal_lm.kernels import check_attention, choose_attention
from rlflow.engines.causal_lm.packing import Stream, pack
from rlflow.engines.sharded.ulysses import order_by_rank
from rlflow.engines.torch import TorchEngine
from rlflow.errors import RecipeError
from tests.helpers import MODEL, sequences, spec

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
    """Attend row by row as torch's kernel for GPUs does, [W, H, D]."""
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


def flash_attn_varlen_func(*given: Any, softmax_scale: float, causal: bool, deterministic: bool) -> Tensor:
    """Attend as the function of flash-attn does."""
    assert causal
    return one_row_after_another(*given, scale=softmax_scale, window_size=(-1, 0), enable_gqa=True)


@pytest.fixture(params=["torch", "flash-attn"])
def rows_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VarlenKernel:
    """Return attention by rows with a kernel for CPUs behind it."""
    monkeypatch.setattr(attention, "varlen_attn", one_row_after_another)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    return flash_varlen_attention if request.param == "flash-attn" else torch_varlen_attention


def attended(
    stream: Stream, heads: int, key_heads: int, by: VarlenKernel = torch_varlen_attention
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of attention and its gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, len(stream.ids), 8) for count in (heads, key_heads, key_heads)]
    query, key, value = given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    out = PackedLayout(stream, CPU).attend(0, query, key, value, 0.3, by)
    return out, list(torch.autograd.grad(out.square().sum(), given))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 8])
def test_rows_of_any_length_are_blocks_of_like_length(
    monkeypatch: pytest.MonkeyPatch, ranks: int, key_heads: int, rows_by: VarlenKernel
) -> None:
    stream = order_by_rank(pack(GIVEN.prompt_ids, GIVEN.response_ids), ranks)
    blocks, of_blocks = attended(stream, 4, key_heads)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda value: True)
    rows, of_rows = attended(stream, 4, key_heads, rows_by)
    tokens = torch.from_numpy(np.unique(np.concatenate([block.ravel() for block in stream.blocks])))
    assert torch.allclose(rows[:, tokens], blocks[:, tokens], atol=1e-6)
    for one, other in zip(of_rows, of_blocks, strict=True):
        assert torch.allclose(one[:, :, tokens], other[:, :, tokens], atol=1e-5)


def test_without_padding_there_are_the_tokens_of_all_rows() -> None:
    stream = pack(GIVEN.prompt_ids, GIVEN.response_ids)
    places, owners, lengths = unpad(stream)
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


def test_the_model_runs_by_the_kernel_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = TorchEngine(spec()).logprobs(GIVEN, 1.0).values.values
    called = []

    def flash(*given: Any, **options: Any) -> Tensor:
        called.append(given)
        return flash_attn_varlen_func(*given, **options)

    monkeypatch.setattr(attention, "has_varlen_kernel", lambda value: True)
    monkeypatch.setattr(attention, "varlen_attn", None)
    monkeypatch.setattr("rlflow.engines.causal_lm.pretrained.choose_attention", lambda spec: "flash_attention_2")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))
    assert TorchEngine(spec()).logprobs(GIVEN, 1.0).values.values == pytest.approx(scores, abs=1e-5)
    assert called


@pytest.mark.parametrize(
    ("wanted", "version", "gpu", "dtype", "chosen"),
    [
        ("auto", "2.8.3", True, "bfloat16", "flash_attention_2"),
        ("auto", None, True, "bfloat16", "sdpa"),
        ("auto", "4.0.0", True, "bfloat16", "sdpa"),
        ("auto", "2.8.3", False, "bfloat16", "sdpa"),
        ("auto", "2.8.3", True, "float32", "sdpa"),
        ("sdpa", "2.8.3", True, "bfloat16", "sdpa"),
        ("flash_attention_2", "2.8.3", True, "bfloat16", "flash_attention_2"),
    ],
)
def test_which_kernel_there_is(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, version: str | None, gpu: bool, dtype: Any, chosen: str
) -> None:
    monkeypatch.setattr(kernels, "installed", lambda name: version and (name, version))
    monkeypatch.setattr(attention, "supports_flash", lambda device: gpu)
    assert choose_attention(replace(spec(model=replace(MODEL, dtype=dtype)), attention=wanted)) == chosen


def test_flash_attention_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "installed", lambda name: None)
    with pytest.raises(RecipeError, match=r"roles\.actor\.attention: 'flash_attention_2' needs flash-attn 2, which is"):
        check_attention("actor", "flash_attention_2")
    monkeypatch.setattr(kernels, "installed", lambda name: (name, "2.8.3"))
    with pytest.raises(RecipeError, match="'flash_attention_2' has no kernel for float32 on 'cpu'"):
        choose_attention(replace(spec(), attention="flash_attention_2"))


@pytest.mark.parametrize(
    ("device", "capability", "has"),
    [("cpu", (9, 0), False), ("cuda", (7, 0), False), ("cuda", (8, 0), True), ("cuda", (9, 4), True)],
)
def test_flash_attention_is_for_ampere_and_later(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], has: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    supports_flash.cache_clear()
    assert supports_flash(torch.device(device)) == has
    supports_flash.cache_clear()
