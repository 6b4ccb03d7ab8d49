"""The output layer of a language model, computing logprobs and entropies without ever holding all logits.

Logits are computed in tiles of tokens and words, and computed again for the gradient. The softmax over tiles follows
Milakov and Gimelshein (arXiv 1805.02867). Ranks that have a part of the vocabulary each exchange a
maximum and sums.
Shapes: U inputs of the layer, T tokens, H hidden size, V vocabulary, C words of a tile.
Importing this file imports torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.tensor import DTensor
from torch.nn import Linear
from torch.nn.functional import linear

from rlflow.engines.base import LOGITS_AT_ONCE, Entropy
from rlflow.engines.causal_lm.compilation import can_compile
from rlflow.errors import EngineError
from rlflow.resources.memory.processes import CPU_LOGITS_AT_ONCE

# The most logits at a time on a GPU without compiled functions, which make several copies in float32.
_PLAIN_LOGITS_AT_ONCE = 2**24
# A logit at which a word is impossible; the sum of a whole vocabulary of them is still finite.
_LOWEST = -1e30


@contextmanager
def scores_as_logits(
    model: Any, places: Tensor, targets: Tensor, temperature: float, entropy: Entropy
) -> Iterator[list[Tensor]]:
    """Make a pass of the model return [1, T, 2] as its logits: the result of ``score_targets``.

    ``targets`` [T] are scored at the inputs ``places`` [T] of the output layer. Yields a list that will hold the
    result. The layer itself is called, since calling it is what gathers sharded weights, also for the gradient.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, Linear):
        raise EngineError(f"an output layer of the kind {type(head).__name__} is not supported: it must be linear.")

    def forward(hidden: Tensor) -> Tensor:
        chosen, words, group = hidden[0].index_select(0, places), targets, None
        weight: Any = head.weight
        bias: Any = head.bias
        if isinstance(weight, DTensor):
            # Tensor-parallel ranks have a part of the vocabulary each.
            mesh = weight.device_mesh
            group, weight, bias = mesh.get_group(), weight.to_local(), None if bias is None else bias.to_local()
            words = targets - mesh.get_local_rank() * len(weight)
        scores = score_targets(chosen, weight, bias, words, temperature, entropy, group)[None]
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


def score_targets(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    entropy: Entropy,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return [T, 2], float32: the logprobs of ``targets`` [T], and the entropies of their distributions.

    Logits come from ``hidden`` [T, H], ``weight`` [V, H] and ``bias`` [V], and are divided by ``temperature``.
    Entropies are zero where they are ``unused``, and have a gradient only where they are ``trained``. The ranks of a
    ``group`` have other words each, and targets are numbered from the first word of a rank.
    """
    options = _Options(temperature, entropy, group)
    scores: Tensor = _TokenScores.apply(hidden, weight, bias, targets, options)  # type: ignore[no-untyped-call]
    return scores


@dataclass(frozen=True)
class _Options:
    temperature: float
    entropy: Entropy
    group: ProcessGroup | None


class _TokenScores(torch.autograd.Function):
    """Logprobs and entropies, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        tiles = _Tiles(hidden, weight, bias, targets)
        states, with_entropy = torch.zeros(len(hidden), 3, device=hidden.device), options.entropy != "unused"
        states[:, 0] = _LOWEST
        add = _fused(_add_logits, hidden.device.type)
        for part in tiles.vocabulary_parts():
            for rows, logits in tiles.of_part(part):
                states[rows] = add(
                    states[rows], logits, tiles.local_targets(part, rows), options.temperature, with_entropy
                )
        if options.group is not None:
            states = _combine(states, options.group, with_entropy)
        log_total, target_logits, entropies = states.unbind(1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropies)
        ctx.options = options
        return torch.stack([target_logits - log_total, entropies], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropies = ctx.saved_tensors
        tiles = _Tiles(hidden, weight, bias, targets)
        options: _Options = ctx.options
        slopes = gradients[0] / options.temperature
        differentiate = _fused(_differentiate, hidden.device.type)
        hidden_gradient = torch.zeros(hidden.shape, device=hidden.device)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for part in tiles.vocabulary_parts():
            # Sums over several tiles are float32; a single product goes where the gradient belongs.
            part_gradient: Tensor | None = None
            place = weight_gradient[part.ids] if weight_gradient is not None and tiles.have_all_rows else None
            part_bias_gradient: Tensor | float = 0.0
            for rows, logits in tiles.of_part(part):
                logit_gradient = differentiate(
                    logits,
                    log_total[rows],
                    entropies[rows],
                    tiles.local_targets(part, rows),
                    slopes[rows],
                    options.temperature,
                    options.entropy == "trained",
                )
                hidden_gradient[rows].add_(logit_gradient @ part.weight)
                if weight_gradient is not None:
                    product = torch.mm(logit_gradient.T, hidden[rows], out=place)
                    part_gradient = product if part_gradient is None else part_gradient.float().add_(product)
                if bias_gradient is not None:
                    part_bias_gradient = part_bias_gradient + logit_gradient.sum(0, dtype=torch.float32)
            if weight_gradient is not None and place is None:
                weight_gradient[part.ids] = 0.0 if part_gradient is None else part_gradient
            if bias_gradient is not None:
                bias_gradient[part.ids] = part_bias_gradient
        if options.group is not None:
            all_reduce(hidden_gradient, group=options.group)
        return hidden_gradient.to(hidden.dtype), weight_gradient, bias_gradient, None, None


def _add_logits(states: Tensor, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    """Return the states [T, 3] after more words, whose ``logits`` are [T, C].

    A state is the logarithm of the sum of e^logit over the words so far, the logit of the target or 0 before it was
    seen, and the entropy among these words. ``targets`` [T] are columns of ``logits``, or outside of them.
    """
    scaled = _scale(logits, temperature)
    log_total, target, entropy = states.unbind(1)
    last = logits.shape[1] - 1
    is_inside = (targets >= 0) & (targets <= last)
    target = target + torch.where(is_inside, scaled.gather(1, targets.clamp(0, last)[:, None])[:, 0], 0.0)
    part = scaled.logsumexp(1)
    new_total = torch.logaddexp(log_total, part)
    if with_entropy:
        logprobs = scaled - part[:, None]
        part_entropy = -(logprobs.exp() * logprobs).sum(1)
        # The entropy of two sets of words, from their shares of the probability and the entropies within each.
        share, part_share = log_total - new_total, part - new_total
        entropy = share.exp() * (entropy - share) + part_share.exp() * (part_entropy - part_share)
    return torch.stack([new_total, target, entropy], dim=1)


def _combine(states: Tensor, group: ProcessGroup, with_entropy: bool) -> Tensor:
    """Return the states [T, 3] of all words from those of this rank's words, as ``_add_logits`` combines two parts."""
    log_total, target, entropy = states.unbind(1)
    largest = log_total.clone()
    all_reduce(largest, ReduceOp.MAX, group=group)
    total = (log_total - largest).exp()
    all_reduce(total, group=group)
    new_total = largest + total.log()
    share = log_total - new_total
    sums = torch.stack([target, share.exp() * (entropy - share) if with_entropy else entropy], dim=1)
    all_reduce(sums, group=group)
    return torch.cat([new_total[:, None], sums], dim=1)


def _differentiate(
    logits: Tensor,
    log_total: Tensor,
    entropies: Tensor,
    targets: Tensor,
    slopes: Tensor,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    """Return the gradient by the ``logits`` [T, C], in their dtype, from ``slopes`` [T, 2] of logprobs and entropies.

    By a logit, the logprob's derivative is [target] - p, and the entropy's is -p (log p + H).
    """
    logprobs = _scale(logits, temperature) - log_total[:, None]
    words = torch.arange(logits.shape[1], device=logits.device)
    p = logprobs.exp()
    gradient = (torch.where(words == targets[:, None], 1.0, 0.0) - p) * slopes[:, :1]
    if with_entropy:
        gradient = gradient - p * (logprobs + entropies[:, None]) * slopes[:, 1:]
    return gradient.to(logits.dtype)


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Return the logits in float32, divided by the temperature.

    The clamp keeps a logit of minus infinity at probability zero, but makes it safe to multiply by it.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    clamped: Tensor = scaled.clamp(min=_LOWEST)
    return clamped


@cache
def _fused(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Return a function of a tile that reads its logits once; on a CPU a tile stays in the caches."""
    fused: Callable[..., Tensor] = torch.compile(function, dynamic=True) if can_compile(device_type) else function
    return fused


@dataclass(frozen=True, eq=False)
class _VocabularyPart:
    """A range of the vocabulary, and the output layer's weights for it."""

    ids: slice
    weight: Tensor
    """[C, H]"""
    bias: Tensor | None
    """[C]"""


class _Tiles:
    """The logits, tile by tile, in the same order for the forward and the backward pass."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
        self._hidden, self._weight, self._bias, self._targets = hidden, weight, bias, targets
        device = hidden.device.type
        max_logits = CPU_LOGITS_AT_ONCE if device == "cpu" else _PLAIN_LOGITS_AT_ONCE
        max_logits = LOGITS_AT_ONCE if can_compile(device) else max_logits
        # Neither the logits of a tile nor the gradients of its part of the weights are much larger than ``max_logits``.
        self._width = min(len(weight), max_logits // min(max(*hidden.shape, 1), int(max_logits**0.5)))
        self._length = max_logits // self._width

    @property
    def have_all_rows(self) -> bool:
        """Return whether a part of the vocabulary has a single tile."""
        return bool(0 < len(self._hidden) <= self._length)

    def vocabulary_parts(self) -> Iterator[_VocabularyPart]:
        """Yield the parts of the vocabulary."""
        for start in range(0, len(self._weight), self._width):
            ids = slice(start, min(start + self._width, len(self._weight)))
            yield _VocabularyPart(ids, self._weight[ids], None if self._bias is None else self._bias[ids])

    def of_part(self, part: _VocabularyPart) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their logits [.., C] over a part."""
        for start in range(0, len(self._hidden), self._length):
            rows = slice(start, min(start + self._length, len(self._hidden)))
            yield rows, linear(self._hidden[rows], part.weight, part.bias)

    def local_targets(self, part: _VocabularyPart, rows: slice) -> Tensor:
        """Return the index [..] of each target in a part; outside of it, it is negative or too large."""
        local: Tensor = self._targets[rows] - part.ids.start
        return local
