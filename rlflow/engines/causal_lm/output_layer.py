"""The output layer of a language model, of which nothing but a logprob and an entropy a token is wanted.

Logits come in chunks of tokens and of the vocabulary, and are made again for the gradient: those of all tokens never
exist together. The softmax over chunks is that of Milakov and Gimelshein (arXiv 1805.02867).
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

# What the caches of a processor hold.
_ON_CPU = 2**20


@contextmanager
def scoring_head(model: Any, places: Tensor, targets: Tensor, temperature: float) -> Iterator[list[Tensor]]:
    """Within it a pass of the model gives [1, T, 2] for its logits: what ``score_targets`` does, of ``targets`` [T] at
    the inputs ``places`` [T] of the layer. Yields a list that holds it, once it is there.

    The layer itself is called: where its weights are sharded, that is when they are gathered, and again for the
    gradient.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, Linear):
        raise EngineError(f"an output layer of the kind {type(head).__name__} is not supported: it must be linear.")

    def forward(hidden: Tensor) -> Tensor:
        scores = score_targets(hidden[0].index_select(0, places), head.weight, head.bias, targets, temperature)[None]
        made.append(scores)
        return scores

    made: list[Tensor] = []
    own = vars(head)
    before = {name: value for name, value in own.items() if name == "forward"}
    own["forward"] = forward
    try:
        yield made
    finally:
        del own["forward"]
        own.update(before)


def score_targets(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    """[T, 2], float32: logprobs of ``targets`` [T], and entropies.

    Of logits divided by ``temperature``, from ``hidden`` [T, H], ``weight`` [V, H] and ``bias`` [V].
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Each kind of numbers is asked for by name below.
    with torch.autocast(device, enabled=False):
        logprobs, entropies = _TokenScores.apply(hidden, weight, bias, targets, temperature, dtype)  # type: ignore[no-untyped-call]
        return torch.stack([logprobs, entropies], dim=1)


class _TokenScores(torch.autograd.Function):
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
        head = _Head(hidden, weight, bias, targets, temperature, dtype)
        highest_of_none = torch.finfo(torch.float32).min
        highest = torch.full((len(hidden),), highest_of_none, device=hidden.device)
        # Sums over the vocabulary of e^(logit - highest), and of the same times (logit - highest).
        total, weighted, chosen = (torch.zeros_like(highest) for _ in range(3))
        for part in head.parts():
            for rows, logits in head.chunks(part):
                local, inside = head.within(part, rows)
                chosen[rows] += torch.where(inside, logits.gather(1, local)[:, 0], 0.0)
                new = torch.maximum(highest[rows], logits.amax(1))
                lower = highest[rows] - new
                shrunk = lower.exp()
                # A logit of minus infinity is a probability of nought, and so is this one; but it can be multiplied.
                shifted = logits.sub_(new[:, None]).clamp_(min=highest_of_none)
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
        head = _Head(hidden, weight, bias, targets, ctx.temperature, ctx.dtype)
        of_logprob, of_entropy = (gradient[:, None] / ctx.temperature for gradient in gradients)
        # Most losses have no entropy in them.
        has_entropy = bool(of_entropy.any())
        of_hidden = torch.zeros(hidden.shape, device=hidden.device)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = None if bias is None else torch.empty_like(bias)
        for part in head.parts():
            # Of a layer that stands still there is none.
            at_weight = None if of_weight is None else torch.zeros(part.weight.shape, device=hidden.device)
            at_bias = torch.zeros(len(part.weight), device=hidden.device)
            for rows, logits in head.chunks(part):
                local, inside = head.within(part, rows)
                logprobs = logits.sub_(log_total[rows, None])
                powers = logprobs.exp() if has_entropy else logprobs.exp_()
                # By a logit: of the logprob the chosen token's indicator minus p, of the entropy -p (log p + H).
                slopes = powers.neg_()
                if has_entropy:
                    # Minus infinity cannot be multiplied by a p of nought.
                    surprise = logprobs.clamp_(min=torch.finfo(torch.float32).min).add_(entropies[rows, None])
                    surprise.mul_(slopes).mul_(of_entropy[rows])
                slopes.scatter_add_(1, local, inside[:, None].float())
                slopes.mul_(of_logprob[rows])
                if has_entropy:
                    slopes.add_(surprise)
                at_bias += slopes.sum(0)
                given = slopes.to(ctx.dtype)
                of_hidden[rows] += given @ part.weight
                if at_weight is not None:
                    at_weight += given.T @ head.hidden[rows]
            if of_weight is not None and at_weight is not None:
                of_weight[part.ids] = at_weight
            if of_bias is not None:
                of_bias[part.ids] = at_bias
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


@dataclass(frozen=True, eq=False)
class _Part:
    """Of the vocabulary."""

    ids: slice
    weight: Tensor
    """[C, H]"""
    bias: Tensor | None
    """[C]"""


class _Head:
    """The chunks in their order: forward and backward meet the same logits."""

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
        most = _ON_CPU if hidden.device.type == "cpu" else LOGITS_AT_ONCE
        # Neither the logits of a part nor its weights, with their gradients, are much more than ``most``.
        self._width = min(len(weight), most // min(max(*hidden.shape, 1), int(most**0.5)))
        self._length = most // self._width

    def parts(self) -> Iterator[_Part]:
        for start in range(0, len(self._weight), self._width):
            ids = slice(start, min(start + self._width, len(self._weight)))
            bias = None if self._bias is None else self._bias[ids].to(self.hidden.dtype)
            yield _Part(ids, self._weight[ids].to(self.hidden.dtype), bias)

    def chunks(self, part: _Part) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their logits over ``part`` [.., C], divided by the temperature; they may be written over."""
        for start in range(0, len(self.hidden), self._length):
            rows = slice(start, min(start + self._length, len(self.hidden)))
            hidden, weight = self.hidden[rows], part.weight.T
            logits = (hidden @ weight if part.bias is None else torch.addmm(part.bias, hidden, weight)).float()
            yield rows, logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def within(self, part: _Part, rows: slice) -> tuple[Tensor, Tensor]:
        """The place of each target in ``part`` [.., 1], and whether it is there at all [..]."""
        local = self._targets[rows] - part.ids.start
        inside = (local >= 0) & (local < len(part.weight))
        return local.clamp(0, len(part.weight) - 1)[:, None], inside
