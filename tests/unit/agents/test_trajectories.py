"""Episodes as rollouts: each token has the experts with which it was first read, whatever the order of calls."""

from random import Random
from typing import Any

import numpy as np
import pytest

from rlflow.agents.base import Outcome
from rlflow.agents.call_generator import CallResult
from rlflow.agents.record import EpisodeRecord, RecordedCall
from rlflow.agents.trajectories import Rollout, build_trajectories
from rlflow.batch import Packed, Prompts
from rlflow.batch.routing import from_records, to_records
from rlflow.batch.segments import unfold
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress, PartialResponse
from tests.helpers import keys

SAMPLES = Prompts(keys=keys(1), ids=Packed.from_rows([(7,)], np.int32), rows=({},))


def records(number: int, count: int) -> Any:
    """Return records whose expert is the number of a call."""
    return to_records(np.full((count, 1, 1), number), 256)


def recorded(seed: int) -> tuple[EpisodeRecord, list[tuple[Any, Any]]]:
    """Return the record of calls that continue or edit earlier ones, and their prompts and replies."""
    random, record = Random(seed), EpisodeRecord()
    sequences: list[tuple[int, ...]] = [(7,)]
    calls: list[tuple[Any, Any]] = []
    for number in range(12):
        start = random.choice(sequences)
        prompt = (*start[: random.randint(1, len(start))], *(random.randrange(3) for _ in range(random.randint(0, 2))))
        reply = tuple(random.randrange(3) for _ in range(random.randint(1, 3)))
        ids = np.array(prompt, np.int32)
        routing = records(number, len(prompt) + len(reply) - 1)[record.num_routed(ids) :]
        piece = PartialResponse(
            np.array(reply, np.int32),
            np.zeros(len(reply), np.float32),
            np.zeros(len(reply), np.int32),
            routing=routing,
        )
        name = record.name_of(ids.tobytes(), 9, False)
        record.used[name] = None
        record.calls[name] = RecordedCall(CallResult(piece, True, True, ""), prompt_ids=ids)
        sequences.append(prompt + reply)
        calls.append((prompt, reply))
    return record, calls


def experts_of(calls: list[tuple[Any, Any]], number: int) -> list[int]:
    """Return the number of the call that has read each token first, by definition."""
    prompt, reply = calls[number]
    earlier = [other for other, (p, r) in enumerate(calls) if other != number and prompt[: len(p + r)] == p + r]
    parent = max(earlier, key=lambda other: len(sum(calls[other], ())), default=None)
    before = [] if parent is None else experts_of(calls, parent)
    return before + [number] * (len(prompt) + len(reply) - 1 - len(before))


@pytest.mark.parametrize("seed", range(10))
def test_each_segment_has_the_experts_of_all_its_tokens(seed: int) -> None:
    record, calls = recorded(seed)
    rollout = Rollout(record, Outcome(finished=True), call_rewards=[0.0] * len(calls))
    segments = unfold(build_trajectories(SAMPLES, [rollout], 1.0).as_sequences())
    assert segments.routing is not None
    lasts = {sum(call, ()): number for number, call in enumerate(calls)}
    for row in range(len(segments)):
        last = lasts[(*segments.prompt_ids[row].tolist(), *segments.response_ids[row].tolist())]
        found = from_records(segments.routing[row], 256, 1).ravel().tolist()
        # Calls with the same tokens may stand for each other.
        assert len(found) == len(sum(calls[last], ())) - 1
        assert len(calls) != len(lasts) or found == experts_of(calls, last)


def test_an_interrupted_episode_keeps_them() -> None:
    record, _ = recorded(0)
    interrupted = build_trajectories(SAMPLES, [Rollout(record)], 1.0)
    (partial,) = GroupProgress(SAMPLES, Sampling(max_tokens=99), interrupted).partial_responses(np.array([0]))
    again = EpisodeRecord.from_partial(partial)
    assert again.to_bytes() == record.to_bytes()
    for name, call in record.calls.items():
        same = again.calls[name].result.reply.routing
        assert same is not None
        assert call.result.reply.routing is not None
        assert same.tobytes() == call.result.reply.routing.tobytes()
