"""Segments of responses: what a model reads as sequences of their own.

A conversation whose history an agent rewrites is no longer one sequence of tokens. It has several segments, each with
the prompt that the model really read. Unfolding changes where rows begin, and no values.

Shapes: B responses, S segments of all of them.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.batch import Minibatch, Sequences
from rlflow.batch.routing import regroup_routing

SequencesT = TypeVar("SequencesT", Sequences, Minibatch)

# Bits of a key's number for the sample, and for the prompt: a step has fewer prompts, and a prompt fewer samples.
_BITS = 20


def part_keys(keys: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a key for a part of each sample, such as its ``numbers``-th turn, [N, 3]. ``keys``: those of the samples.

    The first part has the sample's own. Later ones have a prompt number that no other part of the step has: their
    prompts are their own, and so are their random draws, whenever they begin.
    """
    steps, prompts, samples = keys.T
    later = np.stack([steps, (numbers << 2 * _BITS) + (prompts << _BITS) + samples, np.zeros_like(steps)], axis=1)
    return np.where(numbers[:, None] > 0, later, keys)


def segment_numbers(sequences: Sequences) -> list[int]:
    """Return the number of each segment in its response, from 0 on, in the order of ``unfold``."""
    responses = sequences.response_segments
    return [0] * len(sequences) if responses is None else [int(number) for number in responses.run_values]


def unfold(sequences: SequencesT) -> SequencesT:
    """Return one row for each segment, [S]; the sequences themselves if each response is one segment."""
    prompts, responses = sequences.prompt_segments, sequences.response_segments
    if prompts is None or responses is None:
        return sequences
    counts = np.ones(len(sequences), np.int64) if responses.runs_per_row is None else responses.runs_per_row
    lengths, images, routing = responses.run_lengths, sequences.images, sequences.routing
    if images is not None:
        images = images.take(np.repeat(np.arange(len(sequences)), counts))
    if routing is not None:
        routing = regroup_routing(routing, counts, prompts.run_lengths, lengths)
    unfolded = replace(
        sequences,
        keys=part_keys(np.repeat(sequences.keys, counts, axis=0), responses.run_values.astype(np.int64)),
        prompt_ids=sequences.prompt_ids.regroup(prompts.run_lengths),
        response_ids=sequences.response_ids.regroup(lengths),
        prompt_segments=None,
        response_segments=None,
        images=images,
        routing=routing,
    )
    if isinstance(unfolded, Minibatch):
        columns = {name: column.regroup(lengths) for name, column in unfolded.columns.items()}
        unfolded = replace(unfolded, columns=columns, weights=unfolded.weights.regroup(lengths))
    return unfolded
