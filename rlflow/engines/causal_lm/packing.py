"""Packing: many sequences as one stream of tokens, without padding and with each prompt's tokens only once.

Shapes: N tokens of the stream, B rows (sequences), S slots of a block of rows, T response tokens of all rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed

Index = NDArray[np.int64]

# Rows share a block of attention when the shortest is at least this share of the longest.
_MIN_LENGTH_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Stream:
    """The inputs of one forward pass.

    The rollouts of one prompt are neighbours and share its tokens: their slots point at the same places of the stream.
    The last token of a row is never an input, because nothing is predicted from it.
    """

    ids: Index
    """[N]"""
    positions: Index
    """[N]: the position of each token in its own sequence."""
    predictors: Index
    """[T]: the place in the stream from which each response token is predicted, in the order of rows."""
    blocks: tuple[Index, ...]
    """[rows of the block, S] each: the place in the stream of each slot of a row, padded on the right."""
    owners: Index
    """[N]: for each token of the stream a slot that holds it, counted through all blocks laid end to end."""


def pack(prompt_ids: Packed, response_ids: Packed) -> Stream:
    """Pack rows of at least one prompt and one response token each; equal neighbouring prompts are shared."""
    ids: list[NDArray[np.int32]] = []
    positions: list[Index] = []
    rows: list[Index] = []
    predictors: list[Index] = []
    end = 0
    prompt: NDArray[np.int32] | None = None
    prompt_places = np.empty(0, np.int64)
    for row in range(len(prompt_ids)):
        if prompt is None or not np.array_equal(prompt, prompt_ids[row]):
            prompt = prompt_ids[row]
            prompt_places = np.arange(end, end + len(prompt))
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
            end += len(prompt)
        inputs = response_ids[row][:-1]
        input_places = np.arange(end, end + len(inputs))
        ids.append(inputs)
        positions.append(np.arange(len(prompt), len(prompt) + len(inputs)))
        end += len(inputs)
        rows.append(np.concatenate([prompt_places, input_places]))
        predictors.append(rows[-1][len(prompt) - 1 :])
    blocks = tuple(_build_blocks(rows))
    slots = np.concatenate([block.ravel() for block in blocks])
    owners = np.empty(end, np.int64)
    # Padding repeats a row's first token; assigning backwards lets that token's own slot win.
    owners[slots[::-1]] = np.arange(len(slots))[::-1]
    return Stream(
        ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions),
        predictors=np.concatenate(predictors),
        blocks=blocks,
        owners=owners,
    )


def _build_blocks(rows: list[Index]) -> Iterator[Index]:
    """Yield blocks of rows of similar length, the longest first."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    while order:
        longest = len(rows[order[0]])
        count = sum(len(rows[row]) >= _MIN_LENGTH_SHARE * longest for row in order)
        block = np.empty((count, longest), np.int64)
        for line, row in zip(block, order[:count], strict=True):
            line[: len(rows[row])] = rows[row]
            line[len(rows[row]) :] = rows[row][0]
        yield block
        order = order[count:]
