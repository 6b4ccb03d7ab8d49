"""Segments against a brute-force search."""

from random import Random

import numpy as np
import pytest

from rlflow.agents.segments import segments_of


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_calls_in_a_row_are_one_segment() -> None:
    calls = [(ids(1, 2), ids(3)), (ids(1, 2, 3, 4), ids(5, 6)), (ids(1, 2, 3, 4, 5, 6), ids(7))]
    (segment,) = segments_of(calls)
    assert segment.calls == (0, 1, 2)
    assert [context.tolist() for context in segment.context] == [[1, 2], [4], []]


def test_an_edited_history_begins_a_segment() -> None:
    segments = segments_of([(ids(1, 2), ids(3)), (ids(1, 9, 3, 4), ids(5))])
    assert [segment.calls for segment in segments] == [(0,), (1,)]
    assert segments[1].context[0].tolist() == [1, 9, 3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_each_sampled_token_is_in_one_segment_whatever_the_order(seed: int) -> None:
    random = Random(seed)
    sequences: list[tuple[int, ...]] = [(7,)]
    calls = []
    for _ in range(12):
        start = random.choice(sequences)
        prompt = (*start[: random.randint(1, len(start))], *(random.randrange(3) for _ in range(random.randint(0, 2))))
        reply = tuple(random.randrange(3) for _ in range(random.randint(1, 3)))
        sequences.append(prompt + reply)
        calls.append((prompt, reply))
    shuffled = random.sample(range(len(calls)), len(calls))
    found = set()
    for order in (range(len(calls)), shuffled):
        arranged = [calls[number] for number in order]
        segments = segments_of([(ids(*prompt), ids(*reply)) for prompt, reply in arranged])
        used = sorted(number for segment in segments for number in segment.calls)
        assert used == list(range(len(calls)))
        whole = []
        for segment in segments:
            tokens: tuple[int, ...] = ()
            for number, context in zip(segment.calls, segment.context, strict=True):
                tokens += tuple(context.tolist())
                assert tokens == arranged[number][0], "the model read just this"
                tokens += arranged[number][1]
            whole.append(tokens)
            # A segment that could continue another was not the only one to do so.
            for parent in (prompt + reply for prompt, reply in arranged):
                if tuple(segment.context[0].tolist()[: len(parent)]) == parent:
                    assert sum(prompt[: len(parent)] == parent for prompt, _ in arranged) > 1
        found.add(tuple(sorted(whole)))
    assert len(found) == 1
