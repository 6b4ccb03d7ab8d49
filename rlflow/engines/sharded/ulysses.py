"""Sequence parallelism: each rank has a part of a stream's tokens, and in attention a part of the heads of all tokens.

Two all-to-alls a layer exchange the one for the other. Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3.
Shapes: N tokens of the stream, R ranks of the group, n = N / R tokens of a rank, H query heads, K key heads, D head
size.
Importing this file imports torch and transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single, get_rank, get_world_size, new_group

from rlflow.engines.causal_lm.attention import Kernel, PackedLayout
from rlflow.engines.causal_lm.packing import Index, Stream

# [R, ...]: piece i goes to rank i of the group, and what comes from rank i is piece i of the result.
Exchange = Callable[[Tensor], Tensor]


def shared(stream: Stream, size: int) -> Stream:
    """In the order of ranks, of which each has every ``size``-th token: of prompts and of responses alike, since only
    these have logits. At the end are tokens that nothing is predicted from and nobody attends to, for equal parts.
    """
    more = -len(stream.ids) % size
    ids, positions, owners = (np.pad(x, (0, more)) for x in (stream.ids, stream.positions, stream.owners))
    order = np.arange(len(ids)).reshape(-1, size).T.ravel()
    places = np.argsort(order)
    return Stream(
        ids=ids[order],
        positions=positions[order],
        predictors=places[stream.predictors],
        blocks=tuple(places[block] for block in stream.blocks),
        owners=owners[order],
    )


def part_of(stream: Stream, rank: int, size: int) -> tuple[Stream, Index]:
    """The tokens of ``rank`` of ``size`` without their attention, and which predictors are among them."""
    stream = shared(stream, size)
    length = len(stream.ids) // size
    mine = slice(rank * length, (rank + 1) * length)
    tokens = np.flatnonzero(stream.predictors // length == rank)
    part = replace(
        stream,
        ids=stream.ids[mine],
        positions=stream.positions[mine],
        predictors=stream.predictors[tokens] - rank * length,
        blocks=(),
        owners=stream.owners[:0],
    )
    return part, tokens


class UlyssesLayout:
    """Attention over a whole stream, for a rank that has a part of it."""

    def __init__(self, stream: Stream, device: torch.device, size: int, exchange: Exchange) -> None:
        self._inner = PackedLayout(shared(stream, size), device)
        self._size = size
        self._exchange = exchange

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Kernel) -> Tensor:
        """query [1, H, n, D], key and value with K heads; returns [1, n, H, D].

        R divides H, and divides K or is a multiple of it.
        """
        # Where there are fewer key heads than ranks, several ranks have the same one.
        if (copies := self._size // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        query, key, value = (self._all_tokens(x) for x in (query, key, value))
        return self._all_heads(self._inner.attend(layer, query, key, value, scale, kernel))

    def _all_tokens(self, x: Tensor) -> Tensor:
        """[1, H / R, N, D] from [1, H, n, D]."""
        pieces = self._exchange(x[0].view(self._size, -1, *x.shape[2:]))
        return pieces.transpose(0, 1).flatten(1, 2)[None]

    def _all_heads(self, x: Tensor) -> Tensor:
        """[1, n, H, D] from [1, N, H / R, D]."""
        pieces = self._exchange(x[0].view(self._size, -1, *x.shape[2:]))
        return pieces.transpose(0, 1).flatten(1, 2)[None]


class Ulysses:
    """A group of neighbouring ranks that pass one stream through the model together."""

    def __init__(self, size: int) -> None:
        """Called by all ranks together."""
        ranks = get_rank(), get_world_size()
        for first in range(0, ranks[1], size):
            group = new_group(list(range(first, first + size)))
            if first <= ranks[0] < first + size:
                self._group = group
        self._rank, self._size = ranks[0] % size, size

    def part(self, stream: Stream) -> tuple[Stream, Index]:
        return part_of(stream, self._rank, self._size)

    def layout(self, stream: Stream, device: torch.device) -> UlyssesLayout:
        return UlyssesLayout(stream, device, self._size, self._exchange)

    def whole(self, values: Tensor, tokens: Index, count: int) -> Tensor:
        places = torch.from_numpy(tokens).to(values.device)
        mine = values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values)
        everyones = mine.detach().clone()
        all_reduce(everyones, group=self._group)
        # Each place but those of this rank is nought in ``mine``: the sum is exact.
        return mine + (everyones - mine.detach())

    def _exchange(self, pieces: Tensor) -> Tensor:
        received: Tensor = _AllToAll.apply(pieces, self._group)  # type: ignore[no-untyped-call]
        return received


class _AllToAll(torch.autograd.Function):
    """What comes back for gradients goes the same way: the exchange is its own inverse."""

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
