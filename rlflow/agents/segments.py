"""Segments of an episode, which a model reads as sequences of their own, from its calls.

Whatever the order in which calls arrived: a call continues the longest sequence (a prompt with its reply) that its own
prompt begins with. Where several continue the same one, the smallest digest does so in the same segment, and the others
begin segments. So each sampled token is trained in exactly one segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """Calls whose prompts each continue the call before."""

    calls: tuple[int, ...]
    """The numbers of the calls."""
    context: tuple[Ids, ...]
    """The tokens of each call's prompt that are no part of the call before: for the first the whole prompt."""
    parent: int | None = None
    """The call of another segment whose sequence the first prompt begins with, if there is one."""


def segments_of(calls: Sequence[tuple[Ids, Ids]]) -> list[Segment]:
    """Return the segments of calls, each a prompt and its reply; they begin in the order of their first calls."""
    prompts = [prompt.tobytes() for prompt, _ in calls]
    sequences = [prompt + reply.tobytes() for prompt, (_, reply) in zip(prompts, calls, strict=True)]
    longest_first = sorted(range(len(calls)), key=lambda number: -len(sequences[number]))
    children: dict[int, list[int]] = {}
    parents: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        for earlier in longest_first:
            if prompt.startswith(sequences[earlier]):
                children.setdefault(earlier, []).append(number)
                parents[number] = earlier
                break
    following = {
        number: min(continuing, key=lambda child: (blake2b(sequences[child]).digest(), child))
        for number, continuing in children.items()
    }
    firsts = sorted(set(range(len(calls))) - set(following.values()))
    return [_segment(calls, first, following, parents.get(first)) for first in firsts]


def _segment(calls: Sequence[tuple[Ids, Ids]], first: int, following: dict[int, int], parent: int | None) -> Segment:
    numbers, context = [first], [calls[first][0]]
    while (next_number := following.get(numbers[-1])) is not None:
        prompt, reply = calls[numbers[-1]]
        context.append(calls[next_number][0][len(prompt) + len(reply) :])
        numbers.append(next_number)
    return Segment(tuple(numbers), tuple(context), parent)
