"""Transcripts of conversations, and several of them as a batch.

Shapes: B conversations, T tokens of a turn or an answer.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.batch.packed import Packed, Repeated
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
        self.pieces.append(turn)
        self.text, self.interrupted_turn = text, NO_RESPONSE

    def add_answer(self, ids: Sequence[int]) -> None:
        """Add the tokens of the environment's answer. They count as generated with the turn before."""
        tokens, version = np.asarray(ids, np.int32), self.pieces[-1].versions[-1]
        zeros = np.zeros(len(tokens), np.float32)
        self.pieces.append(PartialResponse(tokens, zeros, np.full(len(tokens), version, np.int32)))

    @property
    def all_pieces(self) -> list[PartialResponse]:
        """Return the pieces, with the interrupted turn if there is one."""
        return self.pieces + [self.interrupted_turn] * bool(len(self.interrupted_turn.ids))


def piece_of(turns: Rollouts, row: int) -> PartialResponse:
    """Return a copy of one row, so that the arrays of the whole batch can be freed."""
    return PartialResponse(turns.response_ids[row].copy(), turns.logprobs[row].copy(), turns.versions[row].copy())


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


def build_conversations(samples: Prompts, transcripts: Sequence[Transcript], temperature: float) -> Conversations:
    """Return the B conversations about these samples as a batch, complete or not."""
    pieces = [transcript.all_pieces for transcript in transcripts]

    def column(name: str, dtype: type[np.generic]) -> Packed:
        rows = (
            np.concatenate([getattr(NO_RESPONSE, name), *(getattr(piece, name) for piece in row)]) for row in pieces
        )
        return Packed.from_rows(rows, dtype)

    return Conversations(
        keys=samples.keys,
        prompt_ids=samples.ids,
        images=samples.images,
        response_ids=column("ids", np.int32),
        logprobs=column("logprobs", np.float32),
        versions=Repeated.from_packed(column("versions", np.int32)),
        finished=np.array([transcript.finished for transcript in transcripts], np.bool_),
        temperature=temperature,
        texts=tuple(transcript.text for transcript in transcripts),
        rows=tuple(
            {**row, "environment_reward": sum(transcript.rewards, 0.0)}
            for row, transcript in zip(samples.rows, transcripts, strict=True)
        ),
        turn=Repeated(
            np.array([-1 if number % 2 else number // 2 for row in pieces for number in range(len(row))], np.int32),
            np.array([len(piece.ids) for row in pieces for piece in row], np.int64),
            np.array([len(row) for row in pieces], np.int64),
        ),
        turn_rewards=Packed.from_rows([transcript.turn_rewards for transcript in transcripts], np.float32),
        reasons=np.array([transcript.reason for transcript in transcripts], np.str_),
        measures=({},) * len(transcripts),
        unfinished=Packed.from_rows(
            [np.frombuffer(_rest_of(transcript), np.uint8) for transcript in transcripts], np.uint8
        ),
    )


def resumed_transcript(response: PartialResponse) -> Transcript:
    """Return the transcript of a conversation that an engine was interrupted in, or a new one."""
    if not response.conversation:
        return Transcript()
    pickled = response.conversation.startswith(_WITH_PICKLE)
    saved = json.loads(response.conversation.removeprefix(_WITH_PICKLE))
    ends = np.cumsum(saved["lengths"], dtype=np.int64)
    columns = (np.split(column, ends) for column in (response.ids, response.logprobs, response.versions))
    *pieces, interrupted_turn = (PartialResponse(*parts) for parts in zip(*columns, strict=True))
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
        "text": transcript.text,
        "state": b64encode(state).decode() if isinstance(state, bytes) else state,
        "rewards": transcript.rewards,
    }
    return (_WITH_PICKLE if isinstance(state, bytes) else b"") + json.dumps(rest).encode()
