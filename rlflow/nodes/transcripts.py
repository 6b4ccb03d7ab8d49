"""What was said so far in the conversations of one generation.

Shapes: B conversations, T tokens of a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Conversations, Packed, Prompts, Repeated, Rollouts

Ints = NDArray[np.int64]

# A step has fewer prompts, and a prompt fewer samples, than have numbers of so many bits.
_BITS = 20


@dataclass(frozen=True)
class _Piece:
    """What one side said at once, [T] each."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    own: bool


@dataclass
class Transcript:
    pieces: list[_Piece] = field(default_factory=list)
    text: str = ""
    reward: float = 0.0
    reason: str = ""
    finished: bool = False

    @property
    def length(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def turns(self) -> int:
        return sum(piece.own for piece in self.pieces)


class Transcripts:
    """Of B conversations, which begin with a turn of the model each."""

    def __init__(self, first: Rollouts) -> None:
        self._first = first
        self._all = [Transcript() for _ in range(len(first))]
        self._prompts = _rows(first.prompt_ids)
        self.rows = tuple(first.rows)
        """[B], of the data set."""
        self._turn = 0
        _, prompt, sample = first.keys.T
        # Of the step that they are begun in, whichever others it has.
        self._numbers = (prompt << _BITS) + sample

    def __getitem__(self, row: int) -> Transcript:
        return self._all[row]

    def add_turn(self, written: Rollouts) -> Ints:
        """A turn of the model, by those that were asked. Which of the B conversations they are."""
        numbers = written.keys[:, 1] - (self._turn << 2 * _BITS)
        rows = np.searchsorted(self._numbers, numbers) if self._turn else np.arange(len(self._all))
        columns = (_rows(column) for column in (written.response_ids, written.logprobs, written.versions))
        for row, text, ids, logprobs, versions in zip(rows.tolist(), written.texts, *columns, strict=True):
            self._all[row].pieces.append(_Piece(ids, logprobs, versions, own=True))
            self._all[row].text = text
        self._turn += 1
        return rows

    def add_answer(self, row: int, ids: Sequence[int]) -> None:
        """What the environment said, as tokens."""
        said = np.asarray(ids, np.int32)
        version = self._all[row].pieces[-1].versions[-1]
        nothing = np.zeros(len(said), np.float32)
        self._all[row].pieces.append(_Piece(said, nothing, np.full(len(said), version, np.int32), own=False))

    def asked(self, rows: Sequence[int]) -> Prompts:
        """For the next turn of these conversations: all that was said so far.

        Each is a prompt by itself, with a number that no other turn of the step has, so that it has draws of its own.
        """
        keys = np.zeros((len(rows), 3), np.int64)
        keys[:, 0] = self._first.keys[list(rows), 0]
        keys[:, 1] = (self._turn << 2 * _BITS) + self._numbers[list(rows)]
        said = [[self._prompts[row], *(piece.ids for piece in self._all[row].pieces)] for row in rows]
        return Prompts(keys=keys, ids=Packed.from_rows(map(np.concatenate, said), np.int32), rows=({},) * len(rows))

    def conversations(self) -> Conversations:
        """All of them as they are."""
        first, every = self._first, self._all

        def column(name: str, dtype: type[np.generic]) -> Packed:
            rows = (np.concatenate([getattr(piece, name) for piece in each.pieces]) for each in every)
            return Packed.from_rows(rows, dtype)

        pieces = [piece for each in every for piece in each.pieces]
        return Conversations(
            keys=first.keys,
            prompt_ids=first.prompt_ids,
            response_ids=column("ids", np.int32),
            logprobs=column("logprobs", np.float32),
            versions=Repeated.of(column("versions", np.int32)),
            finished=np.array([each.finished for each in every], np.bool_),
            temperature=first.temperature,
            texts=tuple(each.text for each in every),
            rows=tuple({**row, "environment_reward": each.reward} for row, each in zip(self.rows, every, strict=True)),
            own=Repeated(
                np.array([piece.own for piece in pieces], np.bool_),
                np.array([len(piece.ids) for piece in pieces], np.int64),
                np.array([len(each.pieces) for each in every], np.int64),
            ),
            turns=np.array([each.turns for each in every], np.int64),
            reasons=np.array([each.reason for each in every], np.str_),
        )


def _rows(column: Packed) -> list[NDArray[np.generic]]:
    """Copies: what lies in a store is not held on to."""
    return np.split(np.array(column.values), column.offsets[1:-1])
