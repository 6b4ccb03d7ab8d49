"""Conversations that are interrupted: each token keeps the experts with which it was sampled."""

from typing import Any

import numpy as np

from rlflow.batch import Packed, Prompts
from rlflow.batch.routing import from_records, to_records
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress, PartialResponse
from rlflow.environments.transcript import Transcript, build_conversations, resumed_transcript
from tests.helpers import keys

SAMPLES = Prompts(keys=keys(1), ids=Packed.from_rows([(7, 8)], np.int32), rows=({},))


def turn(expert: int, length: int, read: int) -> PartialResponse:
    """Return a turn of so many tokens, for which the engine has read ``read`` tokens with the same expert."""
    routing = to_records(np.full((read, 1, 1), expert), 8)
    zeros: Any = np.zeros(length, np.float32)
    return PartialResponse(zeros.astype(np.int32), zeros, zeros.astype(np.int32), routing=routing)


def test_a_turn_adds_the_experts_of_what_was_not_read_before() -> None:
    transcript = Transcript()
    transcript.add_turn(turn(1, length=3, read=4), "")
    transcript.add_answer([5, 6])
    transcript.interrupted_turn = transcript.without_known_routing(turn(2, length=2, read=8))
    partial = build_conversations(SAMPLES, [transcript], 1.0)
    assert partial.routing is not None
    assert from_records(partial.routing[0], 8, 1).ravel().tolist() == [1] * 4 + [2] * 4
    (response,) = GroupProgress(SAMPLES, Sampling(max_tokens=99), partial).partial_responses(np.array([0]))
    resumed = resumed_transcript(response)
    assert [0 if piece.routing is None else len(piece.routing) for piece in resumed.all_pieces] == [4, 0, 4]
    resumed.add_turn(turn(3, length=4, read=10), "")
    resumed.is_done = True
    whole = build_conversations(SAMPLES, [resumed], 1.0)
    assert whole.routing is not None
    assert from_records(whole.routing[0], 8, 1).ravel().tolist() == [1] * 4 + [3] * 6
