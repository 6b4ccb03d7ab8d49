"""Attention over packed streams and over a cache of live sequences, as an attention function of transformers.

The model is called with ``layout=``, which transformers hands through to every layer's attention.
Shapes: N tokens of the stream, B rows, S slots, W tokens of all rows, H query heads, K key heads, D head size, C
capacity of the cache.
Importing this file imports torch and transformers.
"""

from functools import cache, cached_property, partial
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlflow.engines.causal_lm.packing import Index, Stream
from rlflow.errors import EngineError

# As transformers knows them: attention over rows of different lengths by torch's kernel, and by that of flash-attn.
NAME, FLASH_NAME = "rlflow", "rlflow_fa2"
# Some releases of torch take fewer key heads than query heads only when told, others have no option for it.
_NAMES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters


class Kernel(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        """query [W, H, D], key and value with K heads; rows end at ``ends`` [B + 1], beginning with 0. [W, H, D]."""


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Kernel) -> Tensor:
        """query [1 or B, H, N or 1, D], key and value with K heads; returns [1 or B, N or 1, H, D].

        ``kernel`` is used where there is one for rows of different lengths."""


class PackedLayout:
    """Each row of a stream attends to itself, causally. Exact: the padding of a block lies behind its rows."""

    def __init__(self, stream: Stream, device: torch.device, *, keep_keys: bool = False) -> None:
        self._stream, self._device = stream, device
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep_keys else None
        """Keys and values [K, N, D] of each layer, for the cache of a generation that goes on from here."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Kernel) -> Tensor:
        if self.kept is not None:
            self.kept.append((key[0], value[0]))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if takes_rows(v):
            places, owners, ends, longest = self._ends
            q, k, v = (x.to(v.dtype).index_select(0, places) for x in (q, k, v))
            return kernel(q, k, v, ends, longest, scale).index_select(0, owners)[None]
        return self._blocks(q, k, v, scale)[None]

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, D], with rows of like length together."""
        blocks, owners = self._places
        outputs = []
        for block in blocks:
            rows, slots = block.shape
            q, k, v = (
                x.index_select(0, block.view(-1)).view(rows, slots, -1, x.shape[-1]) for x in (query, key, value)
            )
            out = scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, owners)

    @cached_property
    def _places(self) -> tuple[list[Tensor], Tensor]:
        blocks = [torch.from_numpy(block).to(self._device) for block in self._stream.blocks]
        return blocks, torch.from_numpy(self._stream.owners).to(self._device)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The places [W] of all tokens of all rows, for each token of the stream one of these [N], and where rows end
        among them [B + 1], beginning with 0; the length of the longest."""
        places, owners, lengths = unpadded(self._stream)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        of_stream, of_rows, at = (torch.from_numpy(x).to(self._device) for x in (owners, places, ends))
        return of_rows, of_stream, at, int(lengths.max())


def takes_rows(value: Tensor) -> bool:
    """Whether there is a kernel for rows of different lengths: flash attention's, for half precision on a GPU that
    has it."""
    return value.dtype in (torch.bfloat16, torch.float16) and has_flash(value.device)


@cache
def has_flash(device: torch.device) -> bool:
    """Ampere and later, and AMD's of the same time (9.x); not V100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def torch_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float
) -> Tensor:
    """Attend by torch's own kernel. Has never run on a GPU."""
    grouped: dict[str, Any] = {"enable_gqa": True} if _NAMES_GROUPS and query.shape[1] != key.shape[1] else {}
    out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


def flash_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float
) -> Tensor:
    """Has never run on a GPU."""
    from flash_attn import flash_attn_varlen_func

    # Its backward pass adds up in the order in which blocks end, unless it is told not to; torch's own asks torch.
    deterministic = torch.are_deterministic_algorithms_enabled()
    out = flash_attn_varlen_func(
        query, key, value, ends, ends, longest, longest, softmax_scale=scale, causal=True, deterministic=deterministic
    )
    assert isinstance(out, Tensor)
    return out


def unpadded(stream: Stream) -> tuple[Index, Index, Index]:
    """The places [W] of all tokens of all rows, for each token of the stream one of these [N], and lengths [B]."""
    # A slot of padding holds a row's first token, whose position is another than its own.
    real = [stream.positions[block] == np.arange(block.shape[1]) for block in stream.blocks]
    kept = np.concatenate([slots.ravel() for slots in real])
    places = np.concatenate([block.ravel() for block in stream.blocks])[kept]
    owners = (np.cumsum(kept) - 1)[stream.owners]
    return places, owners, np.concatenate([slots.sum(1) for slots in real])


class CacheLayout:
    """One new token for each of B live sequences, with the keys and values of all before it."""

    def __init__(self, prefill: PackedLayout, row_of: Tensor, lengths: Tensor, capacity: int) -> None:
        """``row_of`` [B, S]: places of the prompts in the stream, of which the first ``lengths`` [B] count."""
        assert prefill.kept is not None
        self._lengths = lengths
        self._cache: list[tuple[Tensor, Tensor]] = []
        for pair in prefill.kept:
            # Zeros, since a masked place still counts nought times its value.
            keys, values = (x.new_zeros(len(row_of), x.shape[0], capacity, x.shape[2]) for x in pair)
            for whole, kept in zip((keys, values), pair, strict=True):
                whole[:, :, : row_of.shape[1]] = kept[:, row_of].transpose(0, 1)
            self._cache.append((keys, values))

    def drop(self, done: Tensor) -> Tensor:
        """Drops the sequences where ``done`` [B]. Returns the old rows of the new ones [B']: the last fill the gaps."""
        rows = torch.arange(len(done), device=done.device)
        live = int((~done).sum())
        gaps = rows[:live][done[:live]]
        movers = rows[live:][~done[live:]]
        rows[gaps] = movers
        for keys, values in self._cache:
            keys[gaps] = keys[movers]
            values[gaps] = values[movers]
        self._cache = [(keys[:live], values[:live]) for keys, values in self._cache]
        self._lengths = self._lengths[rows[:live]]
        return rows[:live]

    def next_positions(self) -> Tensor:
        """Makes room for one more token of every sequence; returns their positions [B, 1]."""
        self._at = self._lengths
        self._lengths = self._lengths + 1
        self._longest = int(self._lengths.max())
        self._rows = torch.arange(len(self._at), device=self._at.device)
        places = torch.arange(self._longest, device=self._at.device)
        behind = places[None, :] >= self._lengths[:, None]
        self._behind = behind[:, None, None, :] if bool(behind.any()) else None
        return self._at[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Kernel) -> Tensor:
        batch, heads, _, size = query.shape
        keys, values = self._cache[layer]
        keys[self._rows, :, self._at] = key[:, :, 0]
        values[self._rows, :, self._at] = value[:, :, 0]
        # The query heads that share a key head stand in the place of query positions: keys are never repeated.
        grouped = query.reshape(batch, keys.shape[1], -1, size)
        mask = None
        if self._behind is not None:
            mask = query.new_zeros(self._behind.shape).masked_fill(self._behind, float("-inf"))
            mask = mask.expand(-1, -1, grouped.shape[2], -1)
        keys, values = keys[:, :, : self._longest], values[:, :, : self._longest]
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, size)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout,
    *,
    kernel: Kernel,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer."""
    unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if unsupported:
        raise EngineError(f"attention with {unsupported[0]}, which {type(module).__name__} uses, is not supported.")
    return layout.attend(module.layer_idx, query, key, value, scaling, kernel), None


AttentionInterface.register(NAME, partial(attention, kernel=torch_varlen_attention))
AttentionInterface.register(FLASH_NAME, partial(attention, kernel=flash_varlen_attention))
