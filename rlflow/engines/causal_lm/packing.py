"""Many sequences through a model as one stream of tokens, without padding and without computing a prompt twice.

Shapes: N tokens of the stream, B rows (sequences), S slots of a block of rows, T response tokens of all rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed

Index = NDArray[np.int64]

# Rows share a block of attention when the shortest is at least this share of the longest.
_LIKE_LENGTH = 0.8


@dataclass(frozen=True, eq=False)
class Stream:
    """The inputs of one forward pass.

    The rollouts of one prompt stand next to each other and share its tokens: their slots point at the same place of
    the stream. The last token of a row is never an input, since nothing is predicted from it.
    """

    ids: Index
    """[N]"""
    positions: Index
    """[N]: of each token in its own sequence."""
    predictors: Index
    """[T]: where in the stream each response token is predicted, in the order of rows."""
    blocks: tuple[Index, ...]
    """[rows of the block, S] each: the place in the stream of each slot of a row, padded on the right."""
    owners: Index
    """[N]: for each token of the stream a slot that holds it, counted through all blocks laid end to end."""


def pack(prompt_ids: Packed, response_ids: Packed) -> Stream:
    """Rows of at least one prompt and one response token each; equal neighbouring prompts are shared."""
    ids: list[NDArray[np.int32]] = []
    positions: list[Index] = []
    rows: list[Index] = []
    predictors: list[Index] = []
    end = 0
    prompt: NDArray[np.int32] | None = None
    prompt_at = np.empty(0, np.int64)
    for row in range(len(prompt_ids)):
        if prompt is None or not np.array_equal(prompt, prompt_ids[row]):
            prompt = prompt_ids[row]
            prompt_at = np.arange(end, end + len(prompt))
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
            end += len(prompt)
        inputs = response_ids[row][:-1]
        inputs_at = np.arange(end, end + len(inputs))
        ids.append(inputs)
        positions.append(np.arange(len(prompt), len(prompt) + len(inputs)))
        end += len(inputs)
        rows.append(np.concatenate([prompt_at, inputs_at]))
        predictors.append(rows[-1][len(prompt) - 1 :])
    blocks = tuple(_blocks(rows))
    slots = np.concatenate([block.ravel() for block in blocks])
    owners = np.empty(end, np.int64)
    # Padding repeats a row's first token; written backwards, the first slot of a token wins over it.
    owners[slots[::-1]] = np.arange(len(slots))[::-1]
    return Stream(
        ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions),
        predictors=np.concatenate(predictors),
        blocks=blocks,
        owners=owners,
    )


def _blocks(rows: list[Index]) -> Iterator[Index]:
    """Rows of like length together, the longest first."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    while order:
        longest = len(rows[order[0]])
        count = sum(len(rows[row]) >= _LIKE_LENGTH * longest for row in order)
        block = np.empty((count, longest), np.int64)
        for line, row in zip(block, order[:count], strict=True):
            line[: len(rows[row])] = rows[row]
            line[len(rows[row]) :] = rows[row][0]
        yield block
        order = order[count:]
