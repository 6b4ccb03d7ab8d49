"""Episodes as a batch of rollouts.

Shapes: B episodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.base import Outcome
from rlflow.agents.record import EpisodeRecord, RecordedCall
from rlflow.agents.segments import segments_of
from rlflow.batch import Conversations, Packed, Prompts, Repeated
from rlflow.engines.group_progress import PartialResponse

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Rollout:
    """An episode so far: the response of a sample."""

    record: EpisodeRecord
    outcome: Outcome | None = None
    """None for an episode that is interrupted or has failed."""
    reason: str = ""
    """The reason why it failed for good; empty if it did not."""
    call_rewards: Sequence[float] = ()
    """A reward for each call that is done, without that of the end."""
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Return False for an interrupted episode."""
        return self.outcome is not None or bool(self.reason)

    @property
    def length(self) -> int:
        """Return the number of sampled tokens."""
        return self.record.length


@dataclass(frozen=True)
class _Columns:
    """The fields of one row, of N pieces: contexts and replies of all segments in alternation."""

    prompts: tuple[Ids, ...]
    """The prompt of each segment."""
    pieces: tuple[PartialResponse, ...]
    turns: tuple[int, ...]
    """The number of each reply, counted in the order of the pieces; -1 for a context."""
    segments: tuple[int, ...]
    """The segment of each piece."""
    calls: tuple[int, ...]
    """The place of each reply's call among those that are done."""


def build_trajectories(samples: Prompts, rollouts: Sequence[Rollout], temperature: float) -> Conversations:
    """Return the B episodes about these samples as a batch, complete or not."""
    rows = [_columns(sample_ids, rollout) for sample_ids, rollout in zip(_rows(samples.ids), rollouts, strict=True)]

    def column(name: str, dtype: type[np.generic]) -> Packed:
        empty = np.zeros(0, dtype)
        return Packed.from_rows(
            [np.concatenate([empty, *(getattr(piece, name) for piece in row.pieces)]) for row in rows], dtype
        )

    return Conversations(
        keys=samples.keys,
        prompt_ids=Packed.from_rows([np.concatenate(row.prompts) for row in rows], np.int32),
        response_ids=column("ids", np.int32),
        logprobs=column("logprobs", np.float32),
        versions=Repeated.from_packed(column("versions", np.int32)),
        finished=np.array([rollout.outcome is not None and rollout.outcome.finished for rollout in rollouts], np.bool_),
        temperature=temperature,
        texts=tuple(_last_text(rollout) for rollout in rollouts),
        rows=tuple(
            {**row, "environment_reward": _reward(rollout)} for row, rollout in zip(samples.rows, rollouts, strict=True)
        ),
        turn=_runs([[*zip(row.turns, map(_length, row.pieces), strict=True)] for row in rows]),
        turn_rewards=Packed.from_rows(
            [_turn_rewards(row.calls, rollout) for row, rollout in zip(rows, rollouts, strict=True)], np.float32
        ),
        reasons=np.array([rollout.reason for rollout in rollouts], np.str_),
        unfinished=Packed.from_rows(
            [np.frombuffer(b"" if rollout.is_done else rollout.record.to_bytes(), np.uint8) for rollout in rollouts],
            np.uint8,
        ),
        measures=tuple(rollout.measures for rollout in rollouts),
        turn_seconds=Packed.from_rows(
            [_turn_seconds(row.calls, rollout) for row, rollout in zip(rows, rollouts, strict=True)], np.float32
        ),
        prompt_segments=_runs([[*zip(range(len(row.prompts)), map(len, row.prompts), strict=True)] for row in rows]),
        response_segments=_runs([_segment_lengths(row) for row in rows]),
    )


def _columns(sample_ids: Ids, rollout: Rollout) -> _Columns:
    record = rollout.record
    if not rollout.is_done:
        # Only an engine that goes on reads it: the replies one after another, without what was between them.
        replies = tuple(call.result.reply for call in record.calls.values())
        return _Columns((sample_ids,), replies, tuple(range(len(replies))), (0,) * len(replies), ())
    calls = list(record.done_calls())
    if not calls:
        # A response has at least one token. Nobody trains on this one, because it failed.
        return _Columns((sample_ids,), (_context(sample_ids[-1:], 0),), (-1,), (0,), ())
    segments = segments_of([(_prompt_of(call), call.ids) for call in calls])
    pieces: list[PartialResponse] = []
    turns: list[int] = []
    numbers: list[int] = []
    order: list[int] = []
    for number, segment in enumerate(segments):
        for place, (call, context) in enumerate(zip(segment.calls, segment.context, strict=True)):
            reply = calls[call].result.reply
            if place and len(context):
                pieces.append(_context(context, int(pieces[-1].versions[-1])))
                turns.append(-1)
                numbers.append(number)
            pieces.append(reply)
            turns.append(len(order))
            numbers.append(number)
            order.append(call)
    prompts = tuple(segment.context[0] for segment in segments)
    return _Columns(prompts, tuple(pieces), tuple(turns), tuple(numbers), tuple(order))


def _segment_lengths(row: _Columns) -> list[tuple[int, int]]:
    """Return the number of each segment of a row with its response tokens."""
    lengths = [0] * len(row.prompts)
    for segment, piece in zip(row.segments, row.pieces, strict=True):
        lengths[segment] += len(piece.ids)
    return list(enumerate(lengths))


def _context(ids: Ids, version: int) -> PartialResponse:
    """Return tokens that the model read, which count as generated with the reply before."""
    return PartialResponse(ids, np.zeros(len(ids), np.float32), np.full(len(ids), version, np.int32))


def _prompt_of(call: RecordedCall) -> Ids:
    assert call.prompt_ids is not None, "an attempt asks before it is answered"
    return call.prompt_ids


def _reward(rollout: Rollout) -> float:
    """Return the sum of all rewards."""
    return sum(rollout.call_rewards, 0.0) + (rollout.outcome.reward if rollout.outcome else 0.0)


def _turn_rewards(calls: Sequence[int], rollout: Rollout) -> list[float]:
    """Return the reward of each reply, in the order of the row. The last has that of the end too."""
    if not calls:
        return []
    rewards = [rollout.call_rewards[call] for call in calls]
    rewards[calls.index(max(calls))] += rollout.outcome.reward if rollout.outcome else 0.0
    return rewards


def _turn_seconds(calls: Sequence[int], rollout: Rollout) -> list[float]:
    """Return the times of each reply, in the order of the row."""
    done = list(rollout.record.done_calls()) if calls else []
    return [seconds for call in calls for seconds in (done[call].wait_s, done[call].reply_s)]


def _last_text(rollout: Rollout) -> str:
    return next((call.result.text for call in reversed(list(rollout.record.done_calls()))), "")


def _length(piece: PartialResponse) -> int:
    return len(piece.ids)


def _rows(packed: Packed) -> list[Ids]:
    return [packed[row] for row in range(len(packed))]


def _runs(rows: Sequence[Sequence[tuple[int, int]]]) -> Repeated:
    """Return rows of runs, each a value and its length."""
    values, lengths = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), ())
    return Repeated(
        np.array(values, np.int32), np.array(lengths, np.int64), np.array([len(row) for row in rows], np.int64)
    )
