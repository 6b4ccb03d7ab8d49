"""Packing: many sequences as one stream of tokens, without padding and with each prompt's tokens only once.

Shapes: N tokens of the stream, S segments, B rows (sequences), T response tokens of all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed

Index = NDArray[np.int64]

# Rows share a block of attention when the shortest is at least this share of the longest.
_MIN_LENGTH_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Segments:
    """The pieces of a stream, one after another: each prompt, and what each response adds to it.

    The tokens of a segment attend to its prompt and, causally, to each other.
    """

    starts: Index
    """[S]: the place of each segment's first token in the stream."""
    lengths: Index
    """[S]: at least 1."""
    prompt_starts: Index
    """[S]: the place of the first token of each segment's prompt. A prompt has none before it."""
    prompt_lengths: Index
    """[S]: 0 for a prompt."""

    def keys(self) -> Index:
        """Return the places of the tokens that each segment attends to, laid end to end."""
        return ranges(
            np.stack([self.prompt_starts, self.starts], axis=1).ravel(),
            np.stack([self.prompt_lengths, self.lengths], axis=1).ravel(),
        )

    def key_lengths(self) -> Index:
        """Return [S]: to how many tokens the last token of each segment attends."""
        return self.prompt_lengths + self.lengths


@dataclass(frozen=True, eq=False)
class Stream:
    """The inputs of one forward pass.

    The rollouts of one prompt are neighbours and share its tokens. The last token of a row is never an input, because
    nothing is predicted from it.
    """

    ids: Index
    """[N]"""
    positions: Index
    """[N]: the position of each token in its own sequence."""
    predictors: Index
    """[T]: the place in the stream from which each response token is predicted, in the order of rows."""
    segments: Segments
    prompt_rows: Index
    """The first of the rows that share each prompt, in the order of the stream."""
    rope: Index | None = None
    """[3, N]: the positions by which a model rotates queries and keys; None where ``positions`` are these."""
    features: Index | None = None
    """[N]: the number of the image feature that each token stands for, -1 for text. None for models without images."""
    routing: Index | None = None
    """[N]: the place of each token's record in the routing of the rows, -1 without one. None where no row has any."""


def pack(
    prompt_ids: Packed, response_ids: Packed, images: Packed | None = None, routing: Packed | None = None
) -> Stream:
    """Pack rows of at least one prompt and one response token each; equal neighbouring prompts are shared.

    Prompts with images are equal if their images are, too. A shared prompt has the routing of its first row.
    """
    ids: list[NDArray[np.int32]] = []
    positions: list[Index] = []
    records: list[Index] = []
    predictors: list[Index] = []
    segments: list[tuple[int, int, int, int]] = []
    prompt_rows: list[int] = []
    end = prompt_start = 0
    for row in range(len(prompt_ids)):
        if not prompt_rows or not _is_same_prompt(prompt_rows[-1], row, prompt_ids, images):
            prompt_rows.append(row)
            prompt, prompt_start = prompt_ids[row], end
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
            records.append(_places_of_records(routing, row, positions[-1]))
            segments.append((end, len(prompt), end, 0))
            end += len(prompt)
        inputs = response_ids[row][:-1]
        predictors.append(np.concatenate([[prompt_start + len(prompt) - 1], np.arange(end, end + len(inputs))]))
        if len(inputs):
            ids.append(inputs)
            positions.append(np.arange(len(prompt), len(prompt) + len(inputs)))
            records.append(_places_of_records(routing, row, positions[-1]))
            segments.append((end, len(inputs), prompt_start, len(prompt)))
            end += len(inputs)
    return Stream(
        ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions),
        predictors=np.concatenate(predictors),
        segments=Segments(*np.array(segments, np.int64).T),
        prompt_rows=np.array(prompt_rows),
        routing=None if routing is None else np.concatenate(records),
    )


def _places_of_records(routing: Packed | None, row: int, positions: Index) -> Index:
    """Return the place of the record of each token of a row, -1 for tokens without one."""
    if routing is None:
        return positions
    return np.where(positions < routing.lengths[row], routing.offsets[row] + positions, -1)


def _is_same_prompt(first: int, second: int, prompt_ids: Packed, images: Packed | None) -> bool:
    return np.array_equal(prompt_ids[first], prompt_ids[second]) and (
        images is None or np.array_equal(images[first], images[second])
    )


def rope_of_stream(stream: Stream, prompt_positions: Sequence[Index]) -> Index:
    """Return rotary positions [3, N] from those of each prompt in the stream, [3, tokens].

    A response continues behind the largest position of its prompt.
    """
    rope = np.broadcast_to(stream.positions, (3, len(stream.positions))).copy()
    segments = stream.segments
    is_prompt = segments.prompt_lengths == 0
    for start, positions in zip(segments.starts[is_prompt], prompt_positions, strict=True):
        rope[:, start : start + positions.shape[1]] = positions
    for number in np.flatnonzero(~is_prompt):
        start, length = segments.starts[number], segments.lengths[number]
        prompt_length = segments.prompt_lengths[number]
        last = segments.prompt_starts[number] + prompt_length - 1
        rope[:, start : start + length] += rope[:, last].max() + 1 - prompt_length
    return rope


def pad(stream: Stream, multiple: int) -> Stream:
    """Make the number of tokens a multiple, by tokens at the end of which nothing is predicted."""
    length, padding = len(stream.ids), -len(stream.ids) % multiple
    if not padding:
        return stream
    last, segments = (length, padding, length, 0), stream.segments
    columns = (segments.starts, segments.lengths, segments.prompt_starts, segments.prompt_lengths)
    return replace(
        stream,
        ids=np.pad(stream.ids, (0, padding)),
        positions=np.pad(stream.positions, (0, padding)),
        rope=None if stream.rope is None else np.pad(stream.rope, ((0, 0), (0, padding))),
        features=_pad_numbers(stream.features, padding),
        routing=_pad_numbers(stream.routing, padding),
        segments=Segments(*(np.append(column, value) for column, value in zip(columns, last, strict=True))),
    )


def _pad_numbers(numbers: Index | None, padding: int) -> Index | None:
    return None if numbers is None else np.pad(numbers, (0, padding), constant_values=-1)


def padded_blocks(segments: Segments) -> tuple[list[Index], Index]:
    """Return the rows of a stream in rectangles: blocks of rows of similar length, the longest first.

    A block [rows, slots] holds the place in the stream of each slot, padded on the right. Also returns for each token
    of the stream [N] a slot that holds it, counted through all blocks laid end to end.
    """
    places = np.split(segments.keys(), np.cumsum(segments.key_lengths())[:-1])
    # A prompt is part of the rows of its responses.
    is_response = segments.prompt_lengths > 0
    is_row = is_response | ~np.isin(segments.starts, segments.prompt_starts[is_response])
    blocks = list(_build_blocks([places[segment] for segment in np.flatnonzero(is_row)]))
    slots = np.concatenate([block.ravel() for block in blocks])
    owners = np.empty(int(segments.lengths.sum()), np.int64)
    # Padding repeats a row's first token; assigning backwards lets that token's own slot win.
    owners[slots[::-1]] = np.arange(len(slots))[::-1]
    return blocks, owners


def ranges(starts: Index, lengths: Index) -> Index:
    """Return the whole numbers of all ranges, laid end to end."""
    ends = np.cumsum(lengths)
    numbers: Index = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


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
