"""Micro-batches: the rows of each pass of a model, so that no pass has more tokens than memory was planned for.

A row counts with all of its tokens, those of its prompt included: the rows of a prompt share its tokens in a pass, but
attention reads them for each row. The rows of one unit of the batch, such as the two of a preference pair, are
treated as one row here. Images of a prompt are encoded once in a pass, and their patches may be limited too.

Shapes: B rows, S subgroups, M micro-batches. A subgroup is a set of rows of one prompt that stay in one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import inf

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences

Index = NDArray[np.int64]

# The subgroup sizes that are tried, as shares of a pass: all rows of a prompt that fit, some of them, each row alone.
_SUBGROUP_SHARES = (1.0, 0.25, 0.0)
# The fixed cost of a pass, as a share of the cost of the most tokens it may have.
_PASS_COST = 0.125


@dataclass(frozen=True, eq=False)
class PatchLimit:
    """The most patches of images in a pass, unless a single prompt has more."""

    most: int
    of_rows: Index
    """[B]: the patches of each row's images."""


def build_micro_batches(
    sequences: Sequences, max_tokens: int, count: int | None = None, patches: PatchLimit | None = None
) -> list[Index]:
    """Cut a batch into micro-batches of at most ``max_tokens``; return their rows, the largest micro-batch first.

    Only a single row that is longer, or the rows of one unit, may exceed a limit. There are ``count`` micro-batches, by
    default as few as possible, or fewer if there are fewer rows. They have nearly equal numbers of tokens. The rows of
    a prompt stay in one micro-batch as long as that takes no more passes.
    """
    rows = _Rows.of(sequences, patches)
    count = count or rows.count(max_tokens)
    candidates = [
        assignment
        for share in _SUBGROUP_SHARES
        if rows.is_legal(assignment := rows.balance(share * max_tokens, count), max_tokens, count)
    ]
    pieces = _rows_of_each(min(candidates, key=rows.computed_tokens) if candidates else rows.fit(max_tokens))
    while len(pieces) < min(count, len(rows.lengths)):
        most_rows = max(range(len(pieces)), key=lambda piece: len(pieces[piece]))
        pieces[most_rows : most_rows + 1] = np.array_split(pieces[most_rows], 2)
    pieces.sort(key=lambda piece: -int(rows.lengths[piece].sum()))
    return [_expand_units(piece, sequences) for piece in pieces]


def num_micro_batches(sequences: Sequences, max_tokens: int, patches: PatchLimit | None = None) -> int:
    """Return the number of micro-batches of at most ``max_tokens`` that a batch needs."""
    return _Rows.of(sequences, patches).count(max_tokens)


def build_equal_micro_batches(
    sequences: Sequences, max_tokens: int, patches: PatchLimit | None = None
) -> tuple[list[Index], int]:
    """Cut each rank's ``sequences`` into equally many micro-batches; return them and how many of them are real.

    All ranks of a sharded model must make every pass together. Those after the real ones repeat a row, and their
    results must be ignored. Every rank of the role calls this at the same time.
    """
    import torch

    if torch.distributed.get_world_size() == 1:
        pieces = build_micro_batches(sequences, max_tokens, patches=patches)
        return pieces, len(pieces)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    most = torch.tensor(num_micro_batches(sequences, max_tokens, patches), device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    count = int(most)
    return repeat_shortest_row(build_micro_batches(sequences, max_tokens, count, patches), sequences, count)


def repeat_shortest_row(pieces: list[Index], sequences: Sequences, count: int) -> tuple[list[Index], int]:
    """Fill up to ``count`` micro-batches with the shortest row, since a pass cannot be empty.

    Returns all of them and the number of real ones.
    """
    shortest = np.argsort(sequences.prompt_ids.lengths + sequences.response_ids.lengths)[:1]
    return pieces + [shortest] * (count - len(pieces)), len(pieces)


def restore_order(response_ids: Packed, pieces: Sequence[Index], values: Sequence[NDArray[np.float32]]) -> Packed:
    """Return one value per response token in the order of the batch, from the ``values`` of each micro-batch."""
    rows = np.concatenate(pieces)
    return response_ids.take(rows).like(np.concatenate(values)).take(np.argsort(rows))


def prompt_numbers(sequences: Sequences) -> Index:
    """Return [B]: the number of each row's prompt, counted from 0 in the order of keys."""
    steps, prompts = sequences.keys[:, 0], sequences.keys[:, 1]
    # One number sorts ten times as fast as two columns.
    combined = (steps - steps.min()) * (prompts.max() + 1) + prompts
    return np.unique(combined, return_inverse=True)[1]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The lengths of a batch's rows, and assignments [B] of rows to micro-batches."""

    prompts: Index
    """[B]: the number of each row's prompt."""
    prompt_lengths: Index
    """[B]"""
    response_lengths: Index
    """[B]"""
    lengths: Index
    """[B]: the tokens of prompt and response."""
    patches: Index
    """[B]: the patches of the images of each row's prompt."""
    max_patches: float

    @classmethod
    def of(cls, sequences: Sequences, limit: PatchLimit | None) -> "_Rows":
        first = np.arange(0, len(sequences), sequences.unit_size)
        prompt, response = sequences.prompt_ids.lengths, sequences.response_ids.lengths
        responses, lengths = np.add.reduceat(response, first), np.add.reduceat(prompt + response, first)
        patches, most = (np.zeros_like(lengths), inf) if limit is None else (limit.of_rows[first], limit.most)
        return cls(prompt_numbers(sequences)[first], prompt[first], responses, lengths, patches, most)

    def count(self, max_tokens: int) -> int:
        """Return the number of micro-batches that the rows need."""
        return int(self.fit(max_tokens).max()) + 1

    def fit(self, max_tokens: int) -> Index:
        """Assign rows by first-fit decreasing over subgroups of the size that costs the least."""

        def cost(assignment: Index) -> float:
            return self.computed_tokens(assignment) + _PASS_COST * max_tokens * (int(assignment.max()) + 1)

        return min((self._first_fit(share * max_tokens, max_tokens) for share in _SUBGROUP_SHARES), key=cost)

    def balance(self, subgroup_tokens: float, count: int) -> Index:
        """Assign each subgroup, the largest first, to the micro-batch with the fewest tokens so far."""
        subgroups, sizes = self._subgroups(subgroup_tokens)
        chosen = np.empty(len(sizes), np.int64)
        heap = [(0, number) for number in range(count)]
        for subgroup in np.argsort(-sizes, kind="stable"):
            tokens, chosen[subgroup] = heap[0]
            heapreplace(heap, (tokens + int(sizes[subgroup]), int(chosen[subgroup])))
        return chosen[subgroups]

    def is_legal(self, assignment: Index, max_tokens: int, count: int) -> bool:
        """Return whether all ``count`` micro-batches have rows, and none but single rows exceeds ``max_tokens``."""
        tokens = np.bincount(assignment, weights=self.lengths, minlength=count)
        rows = np.bincount(assignment, minlength=count)
        shares = self._shares(assignment)
        patches = np.bincount(assignment[shares], weights=self.patches[shares], minlength=count)
        encodes = (patches <= self.max_patches) | (np.bincount(assignment[shares], minlength=count) == 1)
        return bool((rows > 0).all() and (((tokens <= max_tokens) & encodes) | (rows == 1)).all())

    def computed_tokens(self, assignment: Index) -> int:
        """Return the tokens that go through the model: a prompt counts once for each micro-batch with rows of it."""
        return int(self.response_lengths.sum() + self.prompt_lengths[self._shares(assignment)].sum())

    def _shares(self, assignment: Index) -> Index:
        """Return a row of each prompt in each micro-batch that has rows of it."""
        return np.unique(assignment * (self.prompts.max() + 1) + self.prompts, return_index=True)[1]

    def _first_fit(self, subgroup_tokens: float, max_tokens: int) -> Index:
        """Assign each subgroup, the largest first, to the first micro-batch with room for it."""
        subgroups, sizes = self._subgroups(subgroup_tokens)
        patches = np.zeros_like(sizes)
        patches[subgroups] = self.patches
        chosen = np.empty(len(sizes), np.int64)
        tokens, encoded, used = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64), 0
        for subgroup in np.argsort(-sizes, kind="stable"):
            fits = tokens[:used] + sizes[subgroup] <= max_tokens
            fits &= encoded[:used] + patches[subgroup] <= self.max_patches
            chosen[subgroup] = fits.argmax() if fits.any() else used
            used = max(used, int(chosen[subgroup]) + 1)
            tokens[chosen[subgroup]] += sizes[subgroup]
            encoded[chosen[subgroup]] += patches[subgroup]
        return chosen[subgroups]

    def _subgroups(self, max_tokens: float) -> tuple[Index, Index]:
        """Return each row's subgroup [B] and each subgroup's tokens [S]: at most ``max_tokens``, or a single row."""
        subgroups = np.empty(len(self.lengths), np.int64)
        sizes: list[int] = []
        last_prompt = -1
        for row in np.argsort(self.prompts, kind="stable"):
            length = int(self.lengths[row])
            if self.prompts[row] != last_prompt or sizes[-1] + length > max_tokens:
                sizes.append(0)
            last_prompt = self.prompts[row]
            subgroups[row] = len(sizes) - 1
            sizes[-1] += length
        return subgroups, np.array(sizes)


def _rows_of_each(assignment: Index) -> list[Index]:
    return [np.flatnonzero(assignment == number) for number in range(int(assignment.max()) + 1)]


def _expand_units(piece: Index, sequences: Sequences) -> Index:
    """Return the rows of the batch for a micro-batch in which the rows of a unit count as one."""
    rows = (piece[:, None] * sequences.unit_size + np.arange(sequences.unit_size)).ravel()
    return rows[rows < len(sequences)]
