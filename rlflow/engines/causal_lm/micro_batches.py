"""Rows for each pass of a model, so that no pass has more tokens than memory was planned for.

A row counts with all of its tokens. The rows of a prompt share it in a pass, but attention holds it for each of them.
Rows of one unit are as one row here.

Shapes: B rows, U units, M micro-batches. A unit is rows of one prompt that go together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences

Index = NDArray[np.int64]

# How large units are tried, as shares of a pass: all the rows of a prompt that fit, some of them, each row by itself.
_UNITS = (1.0, 0.25, 0.0)
# What a pass costs besides its tokens, as a share of what its tokens cost.
_PASS = 0.125


def micro_batches(sequences: Sequences, max_tokens: int, count: int | None = None) -> list[Index]:
    """Of at most ``max_tokens``, unless a single row is longer, or rows of one unit; each in the order of
    the batch, the largest first.

    There are ``count`` of them, at least ``passes_needed``, which is what None means; fewer only where rows are fewer.
    All have nearly equal numbers of tokens. The rows of a prompt stay together as far as that takes no more passes.
    """
    rows = _Rows.of(sequences)
    count = count or passes_needed(sequences, max_tokens)
    ways = [way for share in _UNITS if rows.is_legal(way := rows.even(share * max_tokens, count), max_tokens, count)]
    pieces = _pieces(min(ways, key=rows.computed) if ways else rows.fitted(max_tokens))
    while len(pieces) < min(count, len(rows.lengths)):
        at = max(range(len(pieces)), key=lambda piece: len(pieces[piece]))
        pieces[at : at + 1] = np.array_split(pieces[at], 2)
    pieces.sort(key=lambda piece: -int(rows.lengths[piece].sum()))
    return [_members(piece, sequences) for piece in pieces]


def passes_needed(sequences: Sequences, max_tokens: int) -> int:
    """How many micro-batches are made of ``sequences`` where nothing asks for more."""
    return int(_Rows.of(sequences).fitted(max_tokens).max()) + 1


def in_order(response_ids: Packed, pieces: Sequence[Index], values: Sequence[NDArray[np.float32]]) -> Packed:
    """What passes over ``pieces`` of a batch gave for each response token, in the order of the batch."""
    rows = np.concatenate(pieces)
    return response_ids.take(rows).like(np.concatenate(values)).take(np.argsort(rows))


def prompt_numbers(sequences: Sequences) -> Index:
    """[B]: the number of each row's prompt, counted from 0 in the order of keys."""
    steps, prompts = sequences.keys[:, 0], sequences.keys[:, 1]
    # As one number, which sorts ten times as fast as two.
    both = (steps - steps.min()) * (prompts.max() + 1) + prompts
    return np.unique(both, return_inverse=True)[1]


@dataclass(frozen=True, eq=False)
class _Rows:
    prompts: Index
    """[B]: the number of each row's prompt."""
    prompt_lengths: Index
    """[B]"""
    response_lengths: Index
    """[B]"""
    lengths: Index
    """[B]: of prompt and response."""

    @classmethod
    def of(cls, sequences: Sequences) -> "_Rows":
        first = np.arange(0, len(sequences), sequences.unit_size)
        prompt, response = sequences.prompt_ids.lengths, sequences.response_ids.lengths
        responses, lengths = np.add.reduceat(response, first), np.add.reduceat(prompt + response, first)
        return cls(prompt_numbers(sequences)[first], prompt[first], responses, lengths)

    def fitted(self, max_tokens: int) -> Index:
        """[B]: the micro-batch of each row, by first-fit decreasing of units, of which size costs the least."""

        def cost(way: Index) -> float:
            return self.computed(way) + _PASS * max_tokens * (int(way.max()) + 1)

        return min((self._first_fit(share * max_tokens, max_tokens) for share in _UNITS), key=cost)

    def even(self, unit: float, count: int) -> Index:
        """[B]: the micro-batch of each row, where each unit, the largest first, goes to the smallest so far."""
        units, sizes = self._units(unit)
        chosen = np.empty(len(sizes), np.int64)
        heap = [(0, at) for at in range(count)]
        for at in np.argsort(-sizes, kind="stable"):
            tokens, chosen[at] = heap[0]
            heapreplace(heap, (tokens + int(sizes[at]), int(chosen[at])))
        return chosen[units]

    def is_legal(self, way: Index, max_tokens: int, count: int) -> bool:
        """Whether there are ``count`` micro-batches and none has more tokens than it may, unless it is a single row."""
        tokens = np.bincount(way, weights=self.lengths, minlength=count)
        rows = np.bincount(way, minlength=count)
        return bool((rows > 0).all() and ((tokens <= max_tokens) | (rows == 1)).all())

    def computed(self, way: Index) -> int:
        """Tokens that go through the model, a prompt once for each micro-batch that has rows of it."""
        parts = np.unique(way * (self.prompts.max() + 1) + self.prompts, return_index=True)[1]
        return int(self.response_lengths.sum() + self.prompt_lengths[parts].sum())

    def _first_fit(self, unit: float, max_tokens: int) -> Index:
        """[B]: the micro-batch of each row, where each unit, the largest first, goes to the first with room."""
        units, sizes = self._units(unit)
        chosen = np.empty(len(sizes), np.int64)
        tokens, used = np.zeros(len(sizes), np.int64), 0
        for at in np.argsort(-sizes, kind="stable"):
            fits = tokens[:used] + sizes[at] <= max_tokens
            chosen[at] = fits.argmax() if fits.any() else used
            used = max(used, int(chosen[at]) + 1)
            tokens[chosen[at]] += sizes[at]
        return chosen[units]

    def _units(self, limit: float) -> tuple[Index, Index]:
        """[B]: the unit of each row, and [U]: the tokens of each. Of at most ``limit`` tokens, or a single row."""
        units = np.empty(len(self.lengths), np.int64)
        sizes: list[int] = []
        last = -1
        for row in np.argsort(self.prompts, kind="stable"):
            length = int(self.lengths[row])
            if self.prompts[row] != last or sizes[-1] + length > limit:
                sizes.append(0)
            last = self.prompts[row]
            units[row] = len(sizes) - 1
            sizes[-1] += length
        return units, np.array(sizes)


def _pieces(way: Index) -> list[Index]:
    return [np.flatnonzero(way == at) for at in range(int(way.max()) + 1)]


def _members(piece: Index, sequences: Sequences) -> Index:
    """The rows of the batch that are as one in ``piece``."""
    rows = (piece[:, None] * sequences.unit_size + np.arange(sequences.unit_size)).ravel()
    return rows[rows < len(sequences)]
