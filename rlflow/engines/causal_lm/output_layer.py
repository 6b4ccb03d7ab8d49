"""The output layer of a language model, computing logprobs and entropies without ever holding all logits.

Logits are computed in chunks of tokens and of the vocabulary, and computed again for the gradient. The softmax over
chunks follows Milakov and Gimelshein (arXiv 1805.02867).
Shapes: U inputs of the layer, T tokens, H hidden size, V vocabulary, C size of the vocabulary's part in a chunk.
Importing this file imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from rlflow.engines.base import LOGITS_AT_ONCE
from rlflow.errors import EngineError

# The most logits at a time on a CPU: about what its caches hold.
_CPU_LOGITS_AT_ONCE = 2**20


@contextmanager
def scores_as_logits(model: Any, places: Tensor, targets: Tensor, temperature: float) -> Iterator[list[Tensor]]:
    """Make a pass of the model return [1, T, 2] as its logits: the result of ``score_targets``.

    ``targets`` [T] are scored at the inputs ``places`` [T] of the output layer. Yields a list that will hold the
    result. The layer itself is called, since calling it is what gathers sharded weights, also for the gradient.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, Linear):
        raise EngineError(f"an output layer of the kind {type(head).__name__} is not supported: it must be linear.")

    def forward(hidden: Tensor) -> Tensor:
        scores = score_targets(hidden[0].index_select(0, places), head.weight, head.bias, targets, temperature)[None]
        computed.append(scores)
        return scores

    computed: list[Tensor] = []
    attributes = vars(head)
    previous = {name: value for name, value in attributes.items() if name == "forward"}
    attributes["forward"] = forward
    try:
        yield computed
    finally:
        del attributes["forward"]
        attributes.update(previous)


def score_targets(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """Return [T, 2], float32: the logprobs of ``targets`` [T], and the entropies of their distributions.

    Logits come from ``hidden`` [T, H], ``weight`` [V, H] and ``bias`` [V], and are divided by ``temperature``.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Every dtype is chosen explicitly below.
    with torch.autocast(device, enabled=False):
        logprobs, entropies = _TokenScores.apply(hidden, weight, bias, targets, temperature, dtype)  # type: ignore[no-untyped-call]
        return torch.stack([logprobs, entropies], dim=1)


class _TokenScores(torch.autograd.Function):
    """Logprobs and entropies, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        chunks = _LogitChunks(hidden, weight, bias, targets, temperature, dtype)
        lowest = torch.finfo(torch.float32).min
        highest = torch.full((len(hidden),), lowest, device=hidden.device)
        # Sums over the vocabulary of e^(logit - highest), and of the same times (logit - highest).
        total, weighted, chosen = (torch.zeros_like(highest) for _ in range(3))
        for part in chunks.vocabulary_parts():
            for rows, logits in chunks.of_part(part):
                local, inside = chunks.locate_targets(part, rows)
                chosen[rows] += torch.where(inside, logits.gather(1, local)[:, 0], 0.0)
                new = torch.maximum(highest[rows], logits.amax(1))
                lower = highest[rows] - new
                shrunk = lower.exp()
                # The clamp keeps a logit of minus infinity at probability zero, but makes it safe to multiply by it.
                shifted = logits.sub_(new[:, None]).clamp_(min=lowest)
                powers = shifted.exp()
                weighted[rows] = (weighted[rows] + total[rows] * lower) * shrunk + torch.linalg.vecdot(powers, shifted)
                total[rows] = total[rows] * shrunk + powers.sum(1)
                highest[rows] = new
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets, highest + log_total, entropies)
        ctx.temperature, ctx.dtype = temperature, dtype
        return chosen - highest - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropies = ctx.saved_tensors
        chunks = _LogitChunks(hidden, weight, bias, targets, ctx.temperature, ctx.dtype)
        logprob_gradient, entropy_gradient = (gradient[:, None] / ctx.temperature for gradient in gradients)
        # Most losses do not use the entropy.
        has_entropy = bool(entropy_gradient.any())
        hidden_gradient = torch.zeros(hidden.shape, device=hidden.device)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = None if bias is None else torch.empty_like(bias)
        for part in chunks.vocabulary_parts():
            part_gradient = None if weight_gradient is None else torch.zeros(part.weight.shape, device=hidden.device)
            part_bias_gradient = torch.zeros(len(part.weight), device=hidden.device)
            for rows, logits in chunks.of_part(part):
                local, inside = chunks.locate_targets(part, rows)
                logprobs = logits.sub_(log_total[rows, None])
                powers = logprobs.exp() if has_entropy else logprobs.exp_()
                # By a logit, the logprob's derivative is [chosen] - p, and the entropy's is -p (log p + H).
                slopes = powers.neg_()
                if has_entropy:
                    # The clamp keeps minus infinity times a p of zero from being NaN.
                    surprise = logprobs.clamp_(min=torch.finfo(torch.float32).min).add_(entropies[rows, None])
                    surprise.mul_(slopes).mul_(entropy_gradient[rows])
                slopes.scatter_add_(1, local, inside[:, None].float())
                slopes.mul_(logprob_gradient[rows])
                if has_entropy:
                    slopes.add_(surprise)
                part_bias_gradient += slopes.sum(0)
                typed = slopes.to(ctx.dtype)
                hidden_gradient[rows] += typed @ part.weight
                if part_gradient is not None:
                    part_gradient += typed.T @ chunks.hidden[rows]
            if weight_gradient is not None and part_gradient is not None:
                weight_gradient[part.ids] = part_gradient
            if bias_gradient is not None:
                bias_gradient[part.ids] = part_bias_gradient
        return hidden_gradient.to(hidden.dtype), weight_gradient, bias_gradient, None, None, None


@dataclass(frozen=True, eq=False)
class _VocabularyPart:
    """A range of the vocabulary, and the output layer's weights for it."""

    ids: slice
    weight: Tensor
    """[C, H]"""
    bias: Tensor | None
    """[C]"""


class _LogitChunks:
    """The logits, chunk by chunk, in the same order for the forward and the backward pass."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> None:
        self.hidden = hidden.to(dtype)
        self._weight, self._bias, self._targets = weight, bias, targets
        self._temperature = temperature
        max_logits = _CPU_LOGITS_AT_ONCE if hidden.device.type == "cpu" else LOGITS_AT_ONCE
        # Neither the logits of a chunk nor the weights of its part, nor their gradients, are much larger than ``most``.
        self._width = min(len(weight), max_logits // min(max(*hidden.shape, 1), int(max_logits**0.5)))
        self._length = max_logits // self._width

    def vocabulary_parts(self) -> Iterator[_VocabularyPart]:
        """Yield the parts of the vocabulary."""
        for start in range(0, len(self._weight), self._width):
            ids = slice(start, min(start + self._width, len(self._weight)))
            bias = None if self._bias is None else self._bias[ids].to(self.hidden.dtype)
            yield _VocabularyPart(ids, self._weight[ids].to(self.hidden.dtype), bias)

    def of_part(self, part: _VocabularyPart) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their logits [.., C] over a part, divided by the temperature; callers may overwrite them."""
        for start in range(0, len(self.hidden), self._length):
            rows = slice(start, min(start + self._length, len(self.hidden)))
            hidden, weight = self.hidden[rows], part.weight.T
            logits = (hidden @ weight if part.bias is None else torch.addmm(part.bias, hidden, weight)).float()
            yield rows, logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def locate_targets(self, part: _VocabularyPart, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the index of each target in a part [.., 1], and whether the target is in it at all [..]."""
        local = self._targets[rows] - part.ids.start
        inside = (local >= 0) & (local < len(part.weight))
        return local.clamp(0, len(part.weight) - 1)[:, None], inside
