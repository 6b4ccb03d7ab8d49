"""Sequence parallelism: a rank holds a part of the tokens and, in attention, a part of the heads of all tokens.

Two all-to-alls per layer switch between the two. Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3.
Shapes: N tokens of the stream, R ranks of the group, n = N / R tokens of a rank, H query heads, K key heads, D head
size, T response tokens.
Importing this file imports torch and transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single, get_rank, get_world_size, new_group

from rlflow.engines.causal_lm.attention import PackedLayout, VarlenKernel
from rlflow.engines.causal_lm.packing import Index, Stream, pad

# [R, ...]: piece i goes to rank i of the group, and piece i of the result comes from rank i.
Exchange = Callable[[Tensor], Tensor]


class Ulysses:
    """A group of ranks that pass one stream through the model together."""

    def __init__(self, size: int, stride: int = 1) -> None:
        """Create the groups, of ranks that are ``stride`` apart; all ranks call this at the same time."""
        rank, world_size = get_rank(), get_world_size()
        self._rank, self._size = rank // stride % size, size
        for first in (first for first in range(world_size) if first // stride % size == 0):
            ranks = list(range(first, first + size * stride, stride))
            group = new_group(ranks)
            if rank in ranks:
                self._group = group

    def shard(self, stream: Stream) -> tuple[Stream, Index]:
        """Return this rank's tokens, and which of the T response tokens they predict."""
        return shard_stream(stream, self._rank, self._size)

    def attention_layout(self, stream: Stream, device: torch.device, dtype: torch.dtype) -> "UlyssesLayout":
        """Return attention over the whole stream, to be called with this rank's tokens."""
        return UlyssesLayout(stream, device, dtype, self._size, self._exchange)

    def gather(self, values: Tensor, tokens: Index, count: int) -> Tensor:
        """Return [T, ...] from each rank's ``values`` for its ``tokens``. Gradients flow to this rank's values only."""
        places = torch.from_numpy(tokens).to(values.device)
        local = values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values)
        summed = local.detach().clone()
        all_reduce(summed, group=self._group)
        # Each rank's values are zero in all places but its own, so the sum is exact.
        return local + (summed - local.detach())

    def _exchange(self, pieces: Tensor) -> Tensor:
        received: Tensor = _AllToAll.apply(pieces, self._group)  # type: ignore[no-untyped-call]
        return received


def shard_stream(stream: Stream, rank: int, size: int) -> tuple[Stream, Index]:
    """Return every ``size``-th token of a stream, beginning with ``rank``, and which predictors are among them.

    That way each rank gets a similar share of prompts and of responses, and only responses have logits.
    """
    padded = pad(stream, size)
    local = slice(rank, None, size)
    tokens = np.flatnonzero(stream.predictors % size == rank)
    shard = replace(
        padded,
        ids=padded.ids[local],
        positions=padded.positions[local],
        rope=None if padded.rope is None else padded.rope[:, local],
        features=None if padded.features is None else padded.features[local],
        routing=None if padded.routing is None else padded.routing[local],
        predictors=stream.predictors[tokens] // size,
    )
    return shard, tokens


class UlyssesLayout:
    """Attention over a whole stream, for a rank that holds a part of its tokens."""

    def __init__(self, stream: Stream, device: torch.device, dtype: torch.dtype, size: int, exchange: Exchange) -> None:
        self._inner = PackedLayout(pad(stream, size), device, dtype)
        self._size = size
        self._exchange = exchange

    # The exchange between ranks stays outside of compiled layers.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: VarlenKernel
    ) -> Tensor:
        """Return [1, n, H, D] from query [1, H, n, D], and key and value with K heads.

        R must divide H, and either divide K or be a multiple of it.
        """
        # With fewer key heads than ranks, several ranks compute with the same one.
        if (copies := self._size // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        query, key, value = (self._to_all_tokens(x) for x in (query, key, value))
        return self._to_all_heads(self._inner.attend(module, query, key, value, scale, kernel))

    def _to_all_tokens(self, x: Tensor) -> Tensor:
        """Return [1, H / R, N, D] from [1, H, n, D]: rank r has tokens r, r + R, r + 2R and so on."""
        pieces = self._exchange(x[0].view(self._size, -1, *x.shape[2:]))
        return pieces.permute(1, 2, 0, 3).flatten(1, 2)[None]

    def _to_all_heads(self, x: Tensor) -> Tensor:
        """Return [1, n, H, D] from [1, N, H / R, D]."""
        pieces = self._exchange(x[0].view(-1, self._size, *x.shape[2:]).transpose(0, 1))
        return pieces.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """An all-to-all exchange. It is its own inverse, so gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(pieces, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(pieces: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    all_to_all_single(received, pieces.contiguous(), group=group)
    return received
