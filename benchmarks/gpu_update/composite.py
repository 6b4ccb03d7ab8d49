"""The strongest composite of public parts, without rlflow.

A model of transformers through FSDP2 on one rank, with bfloat16 computing and float32 weights, gradient sums and AdamW.
Rows are packed end to end, each with its own prompt, and attend through torch's kernel for rows of different lengths.
Each layer is compiled, and so is the output layer with its softmax, in chunks of tokens.

Shapes: N tokens of a stream, B rows, T response tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks.gpu_update.cases import CLIP_EPS, LEARNING_RATE, MAX_GRAD_NORM, Rows

ATTENTION = "gpu_update_composite"
HEAD_CHUNK = 4096
# The kernel's launch depends on the longest row: rounded up, it takes few values, which compiled code may depend on.
_LONGEST_STEP = 1024
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    ends: Tensor,
    longest: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, N, heads, size]: each row, which ends at ``ends`` [B + 1], attends to itself."""
    if query.device.type == "cuda" and query.dtype != torch.float32:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **_GROUPED)
        assert isinstance(out, Tensor)
        return out[None], None
    places = torch.arange(query.shape[2], device=query.device)
    row = torch.searchsorted(ends.long(), places, right=True)
    allowed = (row[:, None] == row[None]) & (places[:, None] >= places[None])
    out = scaled_dot_product_attention(query, key, value, attn_mask=allowed[None, None], scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the logprobs of ``targets`` [T], float32."""
    return -cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows laid end to end, and the inputs of their loss."""

    ids: NDArray[np.int64]
    """[N]"""
    positions: NDArray[np.int64]
    """[N]"""
    ends: NDArray[np.int32]
    """[B + 1]"""
    longest: int
    predictors: NDArray[np.int64]
    """[T]"""
    targets: NDArray[np.int64]
    """[T]"""
    advantages: NDArray[np.float32]
    """[T]"""
    old_logprobs: NDArray[np.float32]
    """[T]"""

    @classmethod
    def of(cls, rows: Rows, chosen: list[int]) -> "Stream":
        prompts, responses = ([part[row] for row in chosen] for part in (rows.prompts, rows.responses))
        lengths = [rows.lengths[row] for row in chosen]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return cls(
            ids=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]),
            positions=np.concatenate([np.arange(length) for length in lengths]),
            ends=ends.astype(np.int32),
            longest=-(-max(lengths) // _LONGEST_STEP) * _LONGEST_STEP,
            predictors=np.concatenate(
                [np.arange(end - len(response), end) - 1 for end, response in zip(ends[1:], responses, strict=True)]
            ),
            targets=np.concatenate(responses),
            advantages=np.repeat(rows.advantages[chosen], [len(response) for response in responses]),
            old_logprobs=np.concatenate([rows.old_logprobs[row] for row in chosen]),
        )


def micro_batches(rows: Rows, max_tokens: int) -> Iterator[list[int]]:
    """Yield the rows of each micro-batch: nearly equal numbers of tokens, none above ``max_tokens``."""
    lengths = rows.lengths
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = -(-sum(lengths) // max_tokens)
    while True:
        pieces: list[list[int]] = [[] for _ in range(count)]
        sizes = [0] * count
        for row in order:
            piece = sizes.index(min(sizes))
            pieces[piece].append(row)
            sizes[piece] += lengths[row]
        if max(sizes) <= max_tokens or count >= len(lengths):
            yield from (piece for piece in pieces if piece)
            return
        count += 1


class Policy(nn.Module):
    """A model whose output is the logprobs of targets."""

    def __init__(self, model: Any, compiled: bool) -> None:
        super().__init__()
        self.model = model
        self._head = torch.compile(head_logprobs, dynamic=True) if compiled else head_logprobs

    def forward(
        self, ids: Tensor, positions: Tensor, ends: Tensor, longest: int, predictors: Tensor, targets: Tensor
    ) -> Tensor:
        """Return [T], float32."""
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "ends": ends, "longest": longest}
        hidden = self.model.model(**inputs, use_cache=False).last_hidden_state[0].index_select(0, predictors)
        weight = self.model.lm_head.weight
        chunks = zip(torch.split(hidden, HEAD_CHUNK), torch.split(targets, HEAD_CHUNK), strict=True)
        return torch.cat([self._head(chunk, weight, ids) for chunk, ids in chunks])


class Composite:
    """The composite as a system of the comparison."""

    def __init__(self, folder: Path, device: str, dtype: str, micro_batch_tokens: int, compiled: bool) -> None:
        self._device = torch.device(device)
        self._max_tokens = micro_batch_tokens
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
        model.to(self._device).train()
        if not torch.distributed.is_initialized():
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        mesh = init_device_mesh(self._device.type, (1,))
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if dtype == "bfloat16" else None, reduce_dtype=torch.float32
        )
        for layer in model.model.layers:
            if compiled:
                # FSDP's hooks stay outside of the compiled code.
                layer.forward = torch.compile(layer.forward, dynamic=True)
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        self._policy: Any = Policy(model, compiled)
        fully_shard(self._policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        self.module: nn.Module = model
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def prepare(self, rows: Rows) -> Rows:
        return rows

    def update(self, rows: Rows) -> tuple[float, float]:
        """Take one optimizer step; return the loss and the norm of the gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        pieces = list(micro_batches(rows, self._max_tokens))
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            # Weights stay in bfloat16 from one pass to the next, and gradients are reduced once.
            self._policy.set_requires_gradient_sync(is_last)
            self._policy.set_reshard_after_backward(is_last)
            self._policy.set_is_last_backward(is_last)
            loss = self._loss(Stream.of(rows, piece)) / rows.response_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(self._policy.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        return float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _loss(self, stream: Stream) -> Tensor:
        """Return GRPO's loss, summed over the tokens."""
        arrays = {name: value for name, value in vars(stream).items() if name != "longest"}
        tensors = {name: self._send(array) for name, array in arrays.items()}
        advantages, old = tensors.pop("advantages"), tensors.pop("old_logprobs")
        ratio = (self._policy(**tensors, longest=stream.longest) - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages).sum()

    def _send(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
