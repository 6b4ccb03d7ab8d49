"""Transcripts of conversations, and several of them as a batch.

Shapes: B conversations, T tokens of a turn or an answer.
"""

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.batch.packed import Packed, Repeated
from rlflow.batch.routing import Routing, join_routing, pack_routing, split_routing
from rlflow.batch.segments import part_keys
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse

Ints = NDArray[np.int64]

# The first byte of an unfinished conversation whose environment is a pickle; others begin with the brace of JSON.
_WITH_PICKLE = b"P"


@dataclass
class Transcript:
    """One conversation so far: turns of the model and answers of the environment in alternation."""

    pieces: list[PartialResponse] = field(default_factory=list)
    """Complete turns and answers. The first is a turn."""
    interrupted_turn: PartialResponse = NO_RESPONSE
    """The tokens so far of the turn in which an engine was interrupted."""
    text: str = ""
    """The model's last complete turn."""
    state: str | bytes | None = None
    """The environment after its last answer, as JSON or a pickle; None before the first."""
    rewards: list[float] = field(default_factory=list)
    """The environment's reward for each turn that it has answered."""
    reason: str = ""
    """Why the environment failed; empty if it did not."""
    finished: bool = False
    """The environment has ended the conversation."""
    is_done: bool = False
    """No turn follows: the conversation is finished, failed, or at a limit."""

    @property
    def length(self) -> int:
        """Return the number of tokens of both sides."""
        return sum(len(piece.ids) for piece in self.pieces) + len(self.interrupted_turn.ids)

    @property
    def num_turns(self) -> int:
        """Return the number of the model's complete turns."""
        return (len(self.pieces) + 1) // 2

    @property
    def turn_rewards(self) -> list[float]:
        """Return the reward of each complete turn: 0 for one that the environment has not answered."""
        return self.rewards + [0.0] * (self.num_turns - len(self.rewards))

    @property
    def is_answer_due(self) -> bool:
        """Return whether the environment must answer next."""
        return not self.is_done and len(self.pieces) % 2 == 1

    def add_turn(self, turn: PartialResponse, text: str) -> None:
        """Add a complete turn of the model."""
        self.pieces.append(self.without_known_routing(turn))
        self.text, self.interrupted_turn = text, NO_RESPONSE

    def add_answer(self, ids: Sequence[int]) -> None:
        """Add the tokens of the environment's answer. They count as generated with the turn before."""
        tokens, version = np.asarray(ids, np.int32), self.pieces[-1].versions[-1]
        zeros = np.zeros(len(tokens), np.float32)
        self.pieces.append(PartialResponse(tokens, zeros, np.full(len(tokens), version, np.int32)))

    def without_known_routing(self, turn: PartialResponse) -> PartialResponse:
        """Return a turn without the experts of the tokens that were read before, which the pieces have already."""
        known = sum(len(piece.routing) for piece in self.pieces if piece.routing is not None)
        return turn if turn.routing is None else replace(turn, routing=turn.routing[known:])

    @property
    def all_pieces(self) -> list[PartialResponse]:
        """Return the pieces, with the interrupted turn if there is one."""
        return self.pieces + [self.interrupted_turn] * bool(len(self.interrupted_turn.ids))


def piece_of(turns: Rollouts, row: int) -> PartialResponse:
    """Return a copy of one row, so that the arrays of the whole batch can be freed."""
    columns = (turns.response_ids[row].copy(), turns.logprobs[row].copy(), turns.versions[row].copy())
    return PartialResponse(*columns, routing=None if turns.routing is None else turns.routing[row].copy())


def turn_prompts(keys: Ints, prompt_ids: Sequence[NDArray[np.generic]], transcripts: Sequence[Transcript]) -> Prompts:
    """Return all tokens so far of these conversations, as prompts of their next turn.

    ``keys`` [B, 3] and ``prompt_ids`` are those of the conversations.
    """
    ids = [
        np.concatenate([prompt, *(piece.ids for piece in transcript.pieces)])
        for prompt, transcript in zip(prompt_ids, transcripts, strict=True)
    ]
    turns = np.array([transcript.num_turns for transcript in transcripts], np.int64)
    return Prompts(keys=part_keys(keys, turns), ids=Packed.from_rows(ids, np.int32), rows=({},) * len(ids))


@dataclass(frozen=True)
class Piece:
    """Tokens of the model or of the other side."""

    tokens: PartialResponse
    turn: int
    """The number of the model's turn, in the order of the row; -1 for the other side."""
    segment: int = 0


@dataclass(frozen=True)
class ConversationRow:
    """A conversation, complete or not, as a row of a batch."""

    pieces: Sequence[Piece]
    text: str = ""
    """The model's last complete turn."""
    finished: bool = False
    reward: float = 0.0
    """The sum of all rewards."""
    turn_rewards: Sequence[float] = ()
    reason: str = ""
    """Why the environment failed; empty if it did not."""
    unfinished: bytes = b""
    """The bytes that an engine needs to resume it, besides its tokens; empty if it is done."""
    prompts: Sequence[NDArray[np.int32]] | None = None
    """The prompt of each segment. None in all rows where each conversation is one segment about its sample's prompt."""
    measures: Mapping[str, float] = field(default_factory=dict)
    turn_seconds: Sequence[float] | None = None
    """The two times of each turn; None in all rows where nobody measured them."""
    routing: Routing | None = None
    """The experts of its tokens, as in ``Sequences.routing``."""


def build_batch(samples: Prompts, rows: Sequence[ConversationRow], temperature: float) -> Conversations:
    """Return the B conversations about these samples as a batch."""

    def column(name: str, dtype: type[np.generic]) -> Packed:
        tokens = ([getattr(piece.tokens, name) for piece in row.pieces] for row in rows)
        return Packed.from_rows([np.concatenate([getattr(NO_RESPONSE, name), *parts]) for parts in tokens], dtype)

    prompts = [row.prompts for row in rows if row.prompts is not None]
    seconds = [row.turn_seconds for row in rows if row.turn_seconds is not None]
    return Conversations(
        keys=samples.keys,
        prompt_ids=Packed.from_rows([np.concatenate(parts) for parts in prompts], np.int32) if prompts else samples.ids,
        images=samples.images,
        response_ids=column("ids", np.int32),
        logprobs=column("logprobs", np.float32),
        versions=Repeated.from_packed(column("versions", np.int32)),
        finished=np.array([row.finished for row in rows], np.bool_),
        temperature=temperature,
        texts=tuple(row.text for row in rows),
        rows=tuple(
            {**data_row, "environment_reward": row.reward} for data_row, row in zip(samples.rows, rows, strict=True)
        ),
        turn=_runs([[(piece.turn, len(piece.tokens.ids)) for piece in row.pieces] for row in rows]),
        turn_rewards=Packed.from_rows([row.turn_rewards for row in rows], np.float32),
        reasons=np.array([row.reason for row in rows], np.str_),
        measures=tuple(row.measures for row in rows),
        unfinished=Packed.from_rows([np.frombuffer(row.unfinished, np.uint8) for row in rows], np.uint8),
        turn_seconds=Packed.from_rows(seconds, np.float32) if seconds else None,
        prompt_segments=_runs([[*enumerate(map(len, parts))] for parts in prompts]) if prompts else None,
        response_segments=_runs([_segment_lengths(row) for row in rows]) if prompts else None,
        routing=pack_routing([row.routing for row in rows]),
    )


def _segment_lengths(row: ConversationRow) -> list[tuple[int, int]]:
    """Return the number of each segment of a row with its response tokens."""
    lengths = Counter[int]()
    for piece in row.pieces:
        lengths[piece.segment] += len(piece.tokens.ids)
    return [(number, lengths[number]) for number in range(len(row.prompts or ()))]


def _runs(rows: Sequence[Sequence[tuple[int, int]]]) -> Repeated:
    """Return rows of runs, each a value and its length."""
    values, lengths = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), ())
    counts = [len(row) for row in rows]
    return Repeated(np.array(values, np.int32), np.array(lengths, np.int64), np.array(counts, np.int64))


def build_conversations(samples: Prompts, transcripts: Sequence[Transcript], temperature: float) -> Conversations:
    """Return the B conversations about these samples as a batch, complete or not."""
    rows = [
        ConversationRow(
            [Piece(piece, -1 if number % 2 else number // 2) for number, piece in enumerate(transcript.all_pieces)],
            transcript.text,
            transcript.finished,
            sum(transcript.rewards, 0.0),
            transcript.turn_rewards,
            transcript.reason,
            _rest_of(transcript),
            routing=join_routing(piece.routing for piece in transcript.all_pieces),
        )
        for transcript in transcripts
    ]
    return build_batch(samples, rows, temperature)


def resumed_transcript(response: PartialResponse) -> Transcript:
    """Return the transcript of a conversation that an engine was interrupted in, or a new one."""
    if not response.conversation:
        return Transcript()
    pickled = response.conversation.startswith(_WITH_PICKLE)
    saved = json.loads(response.conversation.removeprefix(_WITH_PICKLE))
    ends = np.cumsum(saved["lengths"], dtype=np.int64)
    columns = (np.split(column, ends) for column in (response.ids, response.logprobs, response.versions))
    routing = split_routing(response.routing, saved["routed"])
    *pieces, interrupted_turn = (
        replace(PartialResponse(*parts), routing=records)
        for parts, records in zip(zip(*columns, strict=True), routing, strict=True)
    )
    # Only a conversation with the prefix may hold a pickle, because checkpoints refuse the prefix.
    state = b64decode(saved["state"]) if pickled else saved["state"]
    return Transcript(pieces, interrupted_turn, saved["text"], state, saved["rewards"])


def _rest_of(transcript: Transcript) -> bytes:
    """Return what ``resumed_transcript`` needs besides the tokens; nothing for a conversation that is done."""
    if transcript.is_done:
        return b""
    state = transcript.state
    rest = {
        "lengths": [len(piece.ids) for piece in transcript.pieces],
        "routed": [0 if piece.routing is None else len(piece.routing) for piece in transcript.pieces],
        "text": transcript.text,
        "state": b64encode(state).decode() if isinstance(state, bytes) else state,
        "rewards": transcript.rewards,
    }
    return (_WITH_PICKLE if isinstance(state, bytes) else b"") + json.dumps(rest).encode()
