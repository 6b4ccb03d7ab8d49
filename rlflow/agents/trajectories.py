"""Episodes as a batch of rollouts. Shapes: B episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.base import Outcome
from rlflow.agents.record import EpisodeRecord, RecordedCall
from rlflow.agents.segments import Segment, segments_of
from rlflow.batch import Conversations, Prompts
from rlflow.batch.routing import Routing, extend_routing, join_routing
from rlflow.engines.group_progress import PartialResponse
from rlflow.environments.transcript import ConversationRow, Piece, build_batch

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


def build_trajectories(samples: Prompts, rollouts: Sequence[Rollout], temperature: float) -> Conversations:
    """Return the B episodes about these samples as a batch, complete or not."""
    rows = [_row(samples.ids[row], rollout) for row, rollout in enumerate(rollouts)]
    return build_batch(samples, rows, temperature)


def _row(sample_ids: Ids, rollout: Rollout) -> ConversationRow:
    record, outcome = rollout.record, rollout.outcome
    if not rollout.is_done:
        # Only an engine that goes on reads it: the replies one after another, without what was between them.
        replies = [Piece(call.result.reply, turn) for turn, call in enumerate(record.calls.values())]
        routing = join_routing(piece.tokens.routing for piece in replies)
        rest = record.to_bytes()
        return ConversationRow(replies, unfinished=rest, prompts=[sample_ids], turn_seconds=(), routing=routing)
    calls, end = list(record.done_calls()), outcome.reward if outcome else 0.0
    segments = segments_of([(_prompt_of(call), call.ids) for call in calls])
    # A response has at least one token. Nobody trains on this one, because it failed.
    pieces = [] if calls else [Piece(_context(sample_ids[-1:], 0), -1)]
    order: list[int] = []
    for number, segment in enumerate(segments):
        for place, (call, context) in enumerate(zip(segment.calls, segment.context, strict=True)):
            if place and len(context):
                pieces.append(Piece(_context(context, int(pieces[-1].tokens.versions[-1])), -1, number))
            pieces.append(Piece(calls[call].result.reply, len(order), number))
            order.append(call)
    return ConversationRow(
        pieces,
        calls[-1].result.text if calls else "",
        outcome is not None and outcome.finished,
        sum(rollout.call_rewards, end),
        # The last call also gets the reward of the end.
        [rollout.call_rewards[call] + (end if call == len(calls) - 1 else 0.0) for call in order],
        rollout.reason,
        prompts=[segment.context[0] for segment in segments] or [sample_ids],
        measures=rollout.measures,
        turn_seconds=[seconds for call in order for seconds in (calls[call].wait_s, calls[call].reply_s)],
        routing=_routing(calls, segments),
    )


def _routing(calls: Sequence[RecordedCall], segments: Sequence[Segment]) -> Routing | None:
    """Return the experts of all segments, as far as they are known without a gap."""
    before: dict[int, int | None] = {}
    for segment in segments:
        before |= dict(zip(segment.calls, (segment.parent, *segment.calls), strict=False))
    known: dict[int | None, Routing | None] = {None: None}
    for number in sorted(before, key=lambda number: len(_prompt_of(calls[number]))):
        end = len(_prompt_of(calls[number])) + len(calls[number].ids) - 1
        known[number] = extend_routing(known[before[number]], calls[number].result.reply.routing, end)
    parts: list[Routing] = []
    for segment in segments:
        last = segment.calls[-1]
        routing = known[last]
        parts += [] if routing is None else [routing]
        if routing is None or len(routing) < len(_prompt_of(calls[last])) + len(calls[last].ids) - 1:
            break
    return join_routing(parts)


def _context(ids: Ids, version: int) -> PartialResponse:
    """Return tokens that the model read, which count as generated with the reply before."""
    return PartialResponse(ids, np.zeros(len(ids), np.float32), np.full(len(ids), version, np.int32))


def _prompt_of(call: RecordedCall) -> Ids:
    assert call.prompt_ids is not None, "an attempt asks before it is answered"
    return call.prompt_ids
