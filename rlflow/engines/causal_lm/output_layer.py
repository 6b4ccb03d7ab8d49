"""The output layer of a language model, computing logprobs and entropies without ever holding all logits.

Logits are computed in tiles of tokens and words, and computed again for the gradient. The softmax over tiles follows
Milakov and Gimelshein (arXiv 1805.02867). Ranks that have a part of the vocabulary each exchange a
maximum and sums.
Shapes: U inputs of the layer, T tokens, H hidden size, V vocabulary, C words of a tile, M targets of a token, K words.
Importing this file imports torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather, all_reduce
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
    model: Any, places: Tensor, targets: Tensor, temperature: float, entropy: Entropy, top: int = 0
) -> Iterator[list[Tensor]]:
    """Make a pass of the model return as its logits, [1, T, ...], the result of ``score_targets``.

    ``targets`` [T] or [T, M] are scored at the inputs ``places`` [T] of the output layer; or, with ``top``, that many
    of the likeliest words are returned (``find_top_words``). Yields a list that will hold the result. The layer itself
    is called, since calling it is what gathers sharded weights, also for the gradient.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, Linear):
        raise EngineError(f"an output layer of the kind {type(head).__name__} is not supported: it must be linear.")

    def forward(hidden: Tensor) -> Tensor:
        chosen, first_word, group = hidden[0].index_select(0, places), 0, None
        weight: Any = head.weight
        bias: Any = head.bias
        if isinstance(weight, DTensor):
            # Tensor-parallel ranks have a part of the vocabulary each.
            mesh = weight.device_mesh
            group, weight, bias = mesh.get_group(), weight.to_local(), None if bias is None else bias.to_local()
            first_word = mesh.get_local_rank() * len(weight)
        scores = (
            find_top_words(chosen, weight, bias, top, first_word, temperature, group)
            if top
            else score_targets(chosen, weight, bias, targets - first_word, temperature, entropy, group)
        )
        computed.append(scores[None])
        return computed[0]

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

    With targets [T, M] it is [T, 1 + M]: the logprob of the first, the entropy, and the logprobs of the others.
    Logits come from ``hidden`` [T, H], ``weight`` [V, H] and ``bias`` [V], and are divided by ``temperature``.
    Entropies are zero where they are ``unused``, and have a gradient only where they are ``trained``. The ranks of a
    ``group`` have other words each, and targets are numbered from the first word of a rank.
    """
    options = _Options(temperature, entropy, group)
    targets = targets if targets.dim() > 1 else targets[:, None]
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
        states = torch.zeros(len(hidden), 2 + targets.shape[1], device=hidden.device)
        states[:, 0], with_entropy = _LOWEST, options.entropy != "unused"
        add = _fused(_add_logits, hidden.device.type)
        for part in tiles.vocabulary_parts():
            for rows, logits in tiles.of_part(part):
                states[rows] = add(
                    states[rows], logits, tiles.local_targets(part, rows), options.temperature, with_entropy
                )
        if options.group is not None:
            states = _combine(states, options.group, with_entropy)
        log_total, entropies, logprobs = states[:, 0], states[:, 1], states[:, 2:] - states[:, :1]
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, entropies)
        ctx.options = options
        return torch.cat([logprobs[:, :1], entropies[:, None], logprobs[:, 1:]], dim=1)

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
    """Return the states [T, 2 + M] after more words, whose ``logits`` are [T, C].

    A state is the logarithm of the sum of e^logit over the words so far, the entropy among these words, and the logits
    of the targets or 0 before they were seen. ``targets`` [T, M] are columns of ``logits``, or outside of them.
    """
    scaled = _scale(logits, temperature)
    log_total, entropy = states[:, 0], states[:, 1]
    last = logits.shape[1] - 1
    is_inside = (targets >= 0) & (targets <= last)
    target_logits = states[:, 2:] + torch.where(is_inside, scaled.gather(1, targets.clamp(0, last)), 0.0)
    part = scaled.logsumexp(1)
    new_total = torch.logaddexp(log_total, part)
    if with_entropy:
        logprobs = scaled - part[:, None]
        part_entropy = -(logprobs.exp() * logprobs).sum(1)
        # The entropy of two sets of words, from their shares of the probability and the entropies within each.
        share, part_share = log_total - new_total, part - new_total
        entropy = share.exp() * (entropy - share) + part_share.exp() * (part_entropy - part_share)
    return torch.cat([new_total[:, None], entropy[:, None], target_logits], dim=1)


def _combine(states: Tensor, group: ProcessGroup, with_entropy: bool) -> Tensor:
    """Return the states [T, 2 + M] of all words from those of this rank's, as ``_add_logits`` combines two parts."""
    log_total, entropy = states[:, 0], states[:, 1]
    new_total = _log_of_sum(log_total, group)
    share = log_total - new_total
    part_entropy = share.exp() * (entropy - share) if with_entropy else entropy
    sums = torch.cat([part_entropy[:, None], states[:, 2:]], dim=1)
    all_reduce(sums, group=group)
    return torch.cat([new_total[:, None], sums], dim=1)


def _log_of_sum(logs: Tensor, group: ProcessGroup) -> Tensor:
    """Return the logarithms [T] of the sum over the ranks of a group, from the logarithms of their parts."""
    largest = logs.clone()
    all_reduce(largest, ReduceOp.MAX, group=group)
    total = (logs - largest).exp()
    all_reduce(total, group=group)
    return largest + total.log()


def find_top_words(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    first_word: int,
    temperature: float,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return [T, 2 K], float32: the numbers of the K likeliest words, the likeliest first, and then their logprobs.

    K is ``count``, or the size of a smaller vocabulary. Words of this rank are numbered from ``first_word``; these
    numbers are exact up to 2^24. Nothing has a gradient.
    """
    tiles = _Tiles(hidden, weight, bias, torch.empty(len(hidden), 0, device=hidden.device))
    log_total = torch.full((len(hidden),), _LOWEST, device=hidden.device)
    best = torch.empty(2, len(hidden), 0, device=hidden.device)
    for part in tiles.vocabulary_parts():
        found = []
        for rows, logits in tiles.of_part(part):
            scaled = _scale(logits, temperature)
            log_total[rows] = torch.logaddexp(log_total[rows], scaled.logsumexp(1))
            values, words = scaled.topk(min(count, scaled.shape[1]), dim=1)
            found.append(torch.stack([values, words + float(first_word + part.ids.start)]))
        best = _largest(torch.cat([best, *([torch.cat(found, dim=1)] if found else [])], dim=2), count)
    if group is not None:
        log_total = _log_of_sum(log_total, group)
        parts = [torch.empty_like(best) for _ in range(group.size())]
        all_gather(parts, best, group=group)
        best = _largest(torch.cat(parts, dim=2), count)
    return torch.cat([best[1], best[0] - log_total[:, None]], dim=1)


def _largest(candidates: Tensor, count: int) -> Tensor:
    """Return the ``count`` largest of the logits [T, C] in ``candidates`` [2, T, C], with the words beside them."""
    places = candidates[0].topk(min(count, candidates.shape[2]), dim=1).indices
    return candidates.gather(2, places.expand(2, -1, -1))


def _differentiate(
    logits: Tensor,
    log_total: Tensor,
    entropies: Tensor,
    targets: Tensor,
    slopes: Tensor,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    """Return the gradient by the ``logits`` [T, C], in their dtype, from ``slopes`` [T, 1 + M] of scores.

    By a logit, the logprob's derivative is [target] - p, and the entropy's is -p (log p + H).
    """
    logprobs = _scale(logits, temperature) - log_total[:, None]
    words = torch.arange(logits.shape[1], device=logits.device)
    p = logprobs.exp()
    gradient = (torch.where(words == targets[:, :1], 1.0, 0.0) - p) * slopes[:, :1]
    for column in range(1, targets.shape[1]):
        is_target = torch.where(words == targets[:, column : column + 1], 1.0, 0.0)
        gradient = gradient + (is_target - p) * slopes[:, column + 1 : column + 2]
    if with_entropy:
        gradient = gradient - p * (logprobs + entropies[:, None]) * slopes[:, 1:2]
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
        """Return the index [.., M] of each target in a part; outside of it, it is negative or too large."""
        local: Tensor = self._targets[rows] - part.ids.start
        return local
