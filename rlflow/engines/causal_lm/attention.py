"""Attention over packed streams, and over the KV cache of live sequences, as an attention function of transformers.

The model is called with ``layout=``, which transformers passes through to the attention of every layer.
Shapes: N tokens of the stream, B rows (sequences), S segments, W keys of all segments, H query heads, K key heads,
D head size, C capacity of the cache.
Importing this file imports torch and transformers.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.engines.causal_lm.packing import Segments, Stream, padded_blocks
from rlflow.errors import EngineError

# The names under which transformers knows the two kernels for rows of different lengths: torch's and flash-attn's.
NAME, FLASH_NAME = "rlflow", "rlflow_fa2"
# Some releases of torch need this option for fewer key heads than query heads, others do not have it.
_HAS_GQA_OPTION = "enable_gqa" in signature(varlen_attn).parameters


class VarlenKernel(Protocol):
    """A kernel for causal attention over segments of different lengths, laid end to end."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: "VarlenSegments", scale: float) -> Tensor:
        """Return [N, H, D] from query [N, H, D], and key and value [W, K, D].

        The last query of a segment attends to all keys of that segment, and each one before it to one key less.
        """


class AttentionLayout(Protocol):
    """The way in which the tokens of one forward pass attend to each other."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: VarlenKernel
    ) -> Tensor:
        """Return [1 or B, N or 1, H, D] from query [1 or B, H, N or 1, D], and key and value with K heads.

        ``module`` is the attention of one layer. ``kernel`` is used where ``has_varlen_kernel`` holds.
        """


class VarlenSegments:
    """The segments of a stream as a kernel takes them: the queries as they are, and for each segment all its keys."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        places = segments.keys()
        counts = np.bincount(places)
        self.places = to_device(places, device)
        """[W]: the place in the stream of each key."""
        self.copies = to_device(np.argsort(places, kind="stable"), device)
        """[W]: the keys by their places in the stream: a token of a prompt is a key of several segments."""
        self.first_copies = to_device(np.cumsum(counts) - counts, device)
        """[N]: where the keys of each token of the stream begin in ``copies``."""
        self.query_ends, self.key_ends = (
            to_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device)
            for lengths in (segments.lengths, segments.key_lengths())
        )
        """[S + 1]: the end of each segment, after a zero."""
        self.longest_query, self.longest_key = int(segments.lengths.max()), int(segments.key_lengths().max())

    def gather(self, x: Tensor) -> Tensor:
        """Return the keys or values [W, K, D] of all segments from those of the stream [N, K, D]."""
        gathered: Tensor = _GatherKeys.apply(x, self.places, self.copies, self.first_copies)  # type: ignore[no-untyped-call]
        return gathered


class _GatherKeys(torch.autograd.Function):
    """A selection with repetitions, whose gradients are added up in float32 and in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, copies: Tensor, first_copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies, first_copies)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        copies, first_copies = ctx.saved_tensors
        (gradient,) = gradients
        summed = embedding_bag(copies, gradient.flatten(1), first_copies, mode="sum")
        return summed.view(-1, *gradient.shape[1:]), None, None, None


class PaddedBlocks:
    """The rows of a stream in rectangles, for kernels that know no other shape.

    Exact: padding comes after the tokens of a row, which do not attend to it.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        blocks, owners = padded_blocks(segments)
        self._blocks = [to_device(block, device) for block in blocks]
        self._owners = to_device(owners, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return [N, H, D] from query [N, H, D], and key and value with K heads."""
        outputs = []
        for block in self._blocks:
            rows, slots = block.shape
            q, k, v = (
                x.index_select(0, block.view(-1)).view(rows, slots, -1, x.shape[-1]) for x in (query, key, value)
            )
            out = scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._owners)


class PackedLayout:
    """Causal attention of each row of a stream to itself."""

    def __init__(self, stream: Stream, device: torch.device, dtype: torch.dtype, *, keep_kv: bool = False) -> None:
        """Prepare for queries of ``dtype``: for the kernel for segments of different lengths, where it runs."""
        # Everything that a layer reads is a plain attribute: torch.compile then takes it as an input.
        self._varlen = VarlenSegments(stream.segments, device) if has_varlen_kernel(dtype, device) else None
        self._padded = PaddedBlocks(stream.segments, device) if self._varlen is None else None
        self.layer_kv: list[tuple[Tensor, Tensor]] | None = [] if keep_kv else None
        """Keys and values [K, N, D] of each layer, for the KV cache of a generation that starts from this stream."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: VarlenKernel
    ) -> Tensor:
        """Attend by ``kernel``, or in padded blocks where it does not run."""
        if self.layer_kv is not None:
            self.layer_kv.append((key[0], value[0]))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._varlen is not None:
            gather = self._varlen.gather
            # The rotation of queries and keys may have widened them.
            q, k = q.to(v.dtype), k.to(v.dtype)
            return kernel(q, gather(k), gather(v), self._varlen, scale)[None]
        assert self._padded is not None
        return self._padded.attend(q, k, v, scale)[None]


class CacheLayout:
    """Attention of one new token of each of B live sequences to all tokens before it, whose keys and values it caches.

    It starts from a ``prefill`` of the prompts.
    """

    def __init__(self, prefill: PackedLayout, prompt_places: Tensor, lengths: Tensor, capacity: int) -> None:
        """Fill the cache: ``prompt_places`` [B, S] points into the stream; the first ``lengths`` [B] of a row count."""
        assert prefill.layer_kv is not None
        self._lengths = lengths
        self._cache: list[tuple[Tensor, Tensor]] = []
        for layer_kv in prefill.layer_kv:
            # Zeros, because attention multiplies masked values by zero: uninitialized memory may hold NaN.
            keys, values = (x.new_zeros(len(prompt_places), x.shape[0], capacity, x.shape[2]) for x in layer_kv)
            for cached, prompt in zip((keys, values), layer_kv, strict=True):
                cached[:, :, : prompt_places.shape[1]] = prompt[:, prompt_places].transpose(0, 1)
            self._cache.append((keys, values))

    def drop(self, done: Tensor) -> Tensor:
        """Drop the sequences where ``done`` [B] is True; the last sequences fill the gaps.

        Returns the old rows [B'] of the sequences that remain.
        """
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
        """Make room for one more token per sequence, and return the tokens' positions [B, 1]."""
        self._positions = self._lengths
        self._lengths = self._lengths + 1
        self._longest = int(self._lengths.max())
        self._rows = torch.arange(len(self._positions), device=self._positions.device)
        slots = torch.arange(self._longest, device=self._positions.device)
        unused = slots[None, :] >= self._lengths[:, None]
        self._unused = unused[:, None, None, :] if bool(unused.any()) else None
        return self._positions[:, None]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: VarlenKernel
    ) -> Tensor:
        """Add the new tokens' keys and values to the cache, and attend to all of it."""
        batch, heads, _, size = query.shape
        keys, values = self._cache[module.layer_idx]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        # Query heads that share a key head take the place of query positions, so keys are never repeated.
        grouped = query.reshape(batch, keys.shape[1], -1, size)
        mask = None
        if self._unused is not None:
            mask = query.new_zeros(self._unused.shape).masked_fill(self._unused, float("-inf"))
            mask = mask.expand(-1, -1, grouped.shape[2], -1)
        keys, values = keys[:, :, : self._longest], values[:, :, : self._longest]
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, size)


def has_varlen_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel for segments of different lengths runs on this dtype and device."""
    return dtype in (torch.bfloat16, torch.float16) and supports_flash(device)


@cache
def supports_flash(device: torch.device) -> bool:
    """Return whether the GPU runs flash attention: Ampere and later, and AMD's of the same time (9.x); not V100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def torch_varlen_attention(query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float) -> Tensor:
    """Attend by torch's kernel."""
    grouped: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA_OPTION and query.shape[1] != key.shape[1] else {}
    out = varlen_attn(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scale=scale,
        window_size=(-1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def flash_varlen_attention(query: Tensor, key: Tensor, value: Tensor, segments: VarlenSegments, scale: float) -> Tensor:
    """Attend by the kernel of flash-attn."""
    from flash_attn import flash_attn_varlen_func

    # Its backward pass is not deterministic unless it is asked to be; torch's kernel reads torch's setting.
    deterministic = torch.are_deterministic_algorithms_enabled()
    out = flash_attn_varlen_func(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        softmax_scale=scale,
        causal=True,
        deterministic=deterministic,
    )
    assert isinstance(out, Tensor)
    return out


def attend_by(kernel: VarlenKernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the function that transformers calls in every layer, which attends as the ``layout`` of the pass says."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        layout: AttentionLayout,
        **options: Any,
    ) -> tuple[Tensor, None]:
        unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
        if unsupported:
            raise EngineError(f"attention with {unsupported[0]}, which {type(module).__name__} uses, is not supported.")
        return layout.attend(module, query, key, value, scaling, kernel), None

    return attend


AttentionInterface.register(NAME, attend_by(torch_varlen_attention))
AttentionInterface.register(FLASH_NAME, attend_by(flash_varlen_attention))
