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
    VarlenSegments,
    flash_varlen_attention,
    supports_flash,
    torch_varlen_attention,
)
from rlflow.engines.causal_lm.kernels import check_attention, choose_attention
from rlflow.engines.causal_lm.packing import Stream, pack, pad
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
    """Attend segment by segment as torch's kernel for GPUs does, [N, H, D]."""
    assert options.pop("window_size") == (-1, 0)
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert longest_query == int(query_ends.diff().max())
    assert longest_key == int(key_ends.diff().max())
    assert int(query_ends[-1]) == len(query)
    assert int(key_ends[-1]) == len(key) == len(value)
    rows = []
    for own, all_keys in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        given = ((query, own), (key, all_keys), (value, all_keys))
        q, k, v = (x[slice(*ends)].transpose(0, 1)[None] for x, ends in given)
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        rows.append(scaled_dot_product_attention(q, k, v, attn_mask=sees, **options)[0].transpose(0, 1))
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
    out = PackedLayout(stream, CPU, torch.float32).attend(None, query, key, value, 0.3, by)
    return out, list(torch.autograd.grad(out.square().sum(), given))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 8])
def test_rows_of_any_length_are_blocks_of_like_length(
    monkeypatch: pytest.MonkeyPatch, ranks: int, key_heads: int, rows_by: VarlenKernel
) -> None:
    stream = pad(pack(GIVEN.prompt_ids, GIVEN.response_ids), ranks)
    blocks, of_blocks = attended(stream, 4, key_heads)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda dtype, device: True)
    rows, of_rows = attended(stream, 4, key_heads, rows_by)
    assert torch.allclose(rows, blocks, atol=1e-6)
    for one, other in zip(of_rows, of_blocks, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_segment_attends_to_its_prompt_and_itself() -> None:
    segments = pack(GIVEN.prompt_ids, GIVEN.response_ids).segments
    assert segments.starts.tolist() == [0, 5, 8, 10, 12, 13, 22, 41, 57]
    assert segments.lengths.tolist() == [5, 3, 2, 2, 1, 9, 19, 16, 1]
    ends = np.cumsum(segments.key_lengths())
    keys = [own.tolist() for own in np.split(segments.keys(), ends[:-1])]
    assert keys[:5] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 8, 9],
        [10, 11],
        [10, 11, 12],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_shared_keys_are_added_up_in_float32(dtype: torch.dtype) -> None:
    stream = pack(GIVEN.prompt_ids, GIVEN.response_ids)
    segments = VarlenSegments(stream.segments, CPU)
    x = torch.randn(len(stream.ids), 2, 3).to(dtype).requires_grad_()
    gathered = segments.gather(x)
    assert gathered.equal(x[segments.places])
    direction = torch.randn(gathered.shape).to(dtype)
    (gradient,) = torch.autograd.grad(gathered, x, direction)
    expected = torch.zeros(x.shape, dtype=torch.float64).index_add(0, segments.places, direction.double())
    assert torch.allclose(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


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

    monkeypatch.setattr(attention, "has_varlen_kernel", lambda dtype, device: True)
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
