"""A kernel for CPUs behind torch's attention over segments of different lengths, written out from its definition."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def register_cpu_kernel() -> None:
    """Let torch's operators run on CPUs from now on."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, is_causal, scale = more[:4]
    assert is_causal
    out = torch.empty_like(query)
    for queries, keys in _segments(query_ends, key_ends):
        p = _probabilities(query[queries], key[keys], scale)
        out[queries] = torch.einsum("hqk,khd->qhd", p, _per_query_head(value[keys], query)).to(query.dtype)
    return out, query.new_zeros(query.shape[1], len(query)).float(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query_ends, key_ends, _, _, _, _, scale = more[:7]
    gradients = tuple(torch.zeros_like(x) for x in (query, key, value))
    for queries, keys in _segments(query_ends, key_ends):
        p = _probabilities(query[queries], key[keys], scale)
        g, k, v = gradient[queries].float(), _per_query_head(key[keys], query), _per_query_head(value[keys], query)
        by_p = torch.einsum("qhd,khd->hqk", g, v)
        by_score = p * (by_p - (p * by_p).sum(-1, keepdim=True)) * scale
        by_key = torch.einsum("hqk,qhd->khd", by_score, query[queries].float())
        gradients[0][queries] += torch.einsum("hqk,khd->qhd", by_score, k)
        for total, part in ((gradients[1], by_key), (gradients[2], torch.einsum("hqk,qhd->khd", p, g))):
            total[keys] += part.view(len(part), key.shape[1], -1, key.shape[2]).sum(2)
    return gradients[0], gradients[1], gradients[2]


def _segments(query_ends: Tensor, key_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    for queries, keys in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        yield slice(*queries), slice(*keys)


def _per_query_head(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return [H, Q, K]: the last query sees all keys, and each one before it one key less."""
    scores = scale * torch.einsum("qhd,khd->hqk", query.float(), _per_query_head(key, query))
    sees = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return scores.masked_fill(~sees, -torch.inf).softmax(-1)
