"""Checks of arithmetic: attention over rows of different lengths, and the chunked output layer.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.batch import Packed
from rlflow.commands.doctor.finding import Finding

if TYPE_CHECKING:
    from torch import Tensor

# Relative errors. bfloat16 rounds each number by up to 0.4 %; a wrong mask or head is off by tens of percent.
_FORWARD_ERROR, _GRADIENT_ERROR = 0.02, 0.04
# Logits of a few units are rounded by up to 0.016 before their float32 softmax.
_LOGPROB_ERROR = 0.06
# Prompts and the responses to each, in tokens: neighbours of very different lengths, and one of a single token.
_GROUPS = ((300, (700, 12, 1)), (5, (2048, 40)), (1, (1,)), (900, (900, 900)))


def attention(
    device: str,
    *,
    heads: Sequence[tuple[int, int, int]] = ((14, 2, 64), (32, 8, 128), (16, 16, 128)),
    groups: Sequence[tuple[int, Sequence[int]]] = _GROUPS,
) -> list[Finding]:
    """Compare bfloat16 attention over packed rows with float32 SDPA, forward and backward.

    ``heads`` lists (query heads, key-value heads, head size).
    """
    from rlflow.engines.causal_lm.attention import flash_varlen_attention, torch_varlen_attention
    from rlflow.engines.causal_lm.kernels import has_flash_attn

    kernels = {"torch": torch_varlen_attention} | ({"flash-attn": flash_varlen_attention} if has_flash_attn() else {})
    return [
        finding
        for name, kernel in kernels.items()
        for query_heads, key_heads, size in heads
        for finding in _attention(device, name, kernel, (query_heads, key_heads, size), groups)
    ]


def _attention(
    device: str, name: str, kernel: Any, heads: tuple[int, int, int], groups: Sequence[tuple[int, Sequence[int]]]
) -> list[Finding]:
    import torch

    from rlflow.engines.causal_lm.attention import PackedLayout
    from rlflow.engines.causal_lm.packing import pack

    query_heads, key_heads, size = heads
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, 9, length) for length, _ in groups]
    prompt_ids = Packed.from_rows(
        [row for row, (_, responses) in zip(prompts, groups, strict=True) for _ in responses], np.int32
    )
    response_ids = Packed.from_rows([draw.integers(1, 9, n) for _, lengths in groups for n in lengths], np.int32)
    stream = pack(prompt_ids, response_ids)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, len(stream.ids), size) for count in (query_heads, key_heads, key_heads)]
    tensors = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    direction = torch.randn((1, len(stream.ids), query_heads, size), generator=generator).to(device)

    def attended(dtype: torch.dtype) -> "list[Tensor]":
        """Return the output and the gradients of query, key and value, in float32."""
        inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        query, key, value = inputs
        layout = PackedLayout(stream, torch.device(device), dtype)
        out = layout.attend(None, query, key, value, size**-0.5, kernel)
        gradients = torch.autograd.grad(out.float(), inputs, direction)
        return [tensor.detach().float() for tensor in (out, *gradients)]

    errors = [
        _relative(one, other) for one, other in zip(attended(torch.bfloat16), attended(torch.float32), strict=True)
    ]
    what = f"attention by {name}, {query_heads} heads on {key_heads} of {size}"
    return [
        Finding.at_most(f"{what}: output", errors[0], _FORWARD_ERROR),
        Finding.at_most(f"{what}: gradients", max(errors[1:]), _GRADIENT_ERROR),
    ]


def output_layer(
    device: str, *, tokens: int = 2048, hidden_size: int = 896, vocabulary: int = 151_936
) -> list[Finding]:
    """Compare the chunked output layer with a plain float32 softmax, and its memory with that of all logits."""
    import torch

    from rlflow.engines.causal_lm.output_layer import score_targets

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, hidden_size), generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn((vocabulary, hidden_size), generator=generator) * hidden_size**-0.5).to(
        device, torch.bfloat16
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    on_gpu = hidden.device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    scores = score_targets(hidden, weight, None, targets, 1.0, "trained")
    gradients = torch.autograd.grad(scores[:, 0].sum() + 0.1 * scores[:, 1].sum(), inputs)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0

    plain_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    logprobs = (plain_inputs[0] @ plain_inputs[1].T).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    plain = torch.autograd.grad(chosen.sum() + 0.1 * entropies.sum(), plain_inputs)
    what = f"output layer, vocabulary {vocabulary}"
    errors = (scores - torch.stack([chosen, entropies], dim=1)).detach().abs().amax(0)
    findings = [
        Finding.at_most(f"{what}: logprobs", float(errors[0]), _LOGPROB_ERROR),
        Finding.at_most(f"{what}: entropies", float(errors[1]), _LOGPROB_ERROR),
        Finding.at_most(
            f"{what}: gradients",
            max(_relative(one.float(), other) for one, other in zip(gradients, plain, strict=True)),
            _GRADIENT_ERROR,
        ),
    ]
    if on_gpu:
        share = peak / (4 * tokens * vocabulary)
        findings.append(Finding.at_most(f"{what}: peak memory", share, 1.0, " of all logits"))
    return findings


def _relative(values: "Tensor", expected: "Tensor") -> float:
    """Return the norm of the difference over the norm of ``expected``; infinite for numbers that are not finite."""
    import torch

    error = float(torch.linalg.vector_norm(values - expected) / torch.linalg.vector_norm(expected))
    return error if np.isfinite(error) else float("inf")
