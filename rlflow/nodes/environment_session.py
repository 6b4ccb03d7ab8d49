"""How a model and an environment take turns.

What was said so far in the conversations of one generation.

Shapes: B conversations, T tokens of a piece.

The other side of conversations: environments, the tokenizer, and what was said so far.

Shapes: B conversations.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Gt
from numpy.typing import NDArray

from rlflow.batch import Conversations, Packed, Prompts, Repeated, Rollouts
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.environments.turn import EnvironmentSpec, TurnResult
from rlflow.errors import EngineError, RecipeError, first_line
from rlflow.recipe import Model
from rlflow.rewards.base import Failure
from rlflow.rewards.fork_client import Call
from rlflow.rewards.pool import ProcessPool
from rlflow.schema import Count, Section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class TurnTaking(Section):
    """What both sides go by."""

    environment: str
    """Of rlflow.environments.classes, or ``package.module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    max_turns: Count
    """Of the model."""
    turn_tokens: Count
    """Of one turn of the model."""
    max_tokens: Count
    """Of the whole response, the environment's tokens included."""
    stop: tuple[str, ...] = ()
    """A turn ends with any of these, each a single token, as with the model's own end token."""
    frame: str = "{}"
    """What stands around what the environment says, in the place of the braces: where a chat template has several
    sides, the marks between them."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Of one call of the environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """Where the environment fails the run ends, or the response is left out, as if it had not been written."""

    @property
    def turns(self) -> EnvironmentSpec:
        return EnvironmentSpec(self.environment, self.options, self.timeout_s)


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
            versions=Repeated.from_packed(column("versions", np.int32)),
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


class Exchange:
    """Of one converse node. It lives where tokens are, which on several hosts is not the process of the graph."""

    def __init__(self, node: TurnTaking, model_name: str, model: Model) -> None:
        """``model``: of the role that writes, with its tokenizer; ``model_name`` is the recipe's."""
        self._node, self._model_name, self._model = node, model_name, model
        self._transcripts: Transcripts | None = None
        self._states: dict[int, bytes] = {}

    def begin(self) -> tuple[int, ...]:
        """A new generation. Returns the tokens that end a turn. Raises RecipeError at ``stop``."""
        self._transcripts = None
        self._states.clear()
        return tuple(self._token(marker) for marker in self._node.stop)

    def answered(self, written: Rollouts) -> Prompts | None:
        """From a turn of the model to what it reads before its next one, in those conversations that go on; None where
        none does. Raises EngineError and RecipeError for an environment that fails, where that ends the run."""
        if self._transcripts is None:
            self._transcripts = Transcripts(written)
        told = self._transcripts
        rows = told.add_turn(written)
        asking = {row: told[row].text for row in rows[written.finished].tolist()}
        said: dict[int, str] = {}
        for row, answer in self._answers(asking):
            if isinstance(answer, Failure):
                told[row].reason = self._failed(answer)
                continue
            told[row].reward += answer.reward
            told[row].finished = answer.done
            self._states[row] = answer.state
            if not answer.done and told[row].turns < self._node.max_turns:
                said[row] = answer.text
        going_on = []
        for row, answer_ids in zip(said, self._framed(list(said.values())), strict=True):
            if told[row].length + len(answer_ids) + self._node.turn_tokens <= self._node.max_tokens:
                told.add_answer(row, answer_ids)
                going_on.append(row)
        return told.asked(sorted(going_on)) if going_on else None

    def conversations(self) -> Conversations:
        """[B]: of this generation, in the order in which they were begun."""
        assert self._transcripts is not None
        return self._transcripts.conversations()

    def __getstate__(self) -> Mapping[str, Any]:
        """Processes do not travel, and a tokenizer is loaded where it is used."""
        return {name: value for name, value in vars(self).items() if name not in ("_pool", "_tokenizer")}

    @cached_property
    def _pool(self) -> ProcessPool:
        """Of processes that live as long as this is used."""
        return ProcessPool({self._node.environment: self._node.turns})

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_tokenizer(self._model_name, self._model)

    def _answers(self, asking: Mapping[int, str]) -> Iterator[tuple[int, TurnResult | Failure]]:
        """To the turns of these conversations, in any order."""
        assert self._transcripts is not None
        rows, name = list(asking), self._node.environment
        size = self._pool.callables[name].batch_size
        calls = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            begun = [(self._transcripts.rows[row], self._states.get(row)) for row in part]
            calls.append(Call(name, part, [asking[row] for row in part], begun))
        with closing(self._pool.outcomes(calls)) as outcomes:
            for call, answers in outcomes:
                yield from zip(call.indices, answers, strict=True)

    def _failed(self, failure: Failure) -> str:
        """The reason. Raises RecipeError or EngineError where it ends the run."""
        fact = f"'{self._node.environment}' {failure.reason}"
        if self._node.on_failure == "exclude":
            return fact
        if failure.kind in ("raised", "invalid"):
            raise RecipeError("environment", fact, fix="on_failure: exclude leaves such conversations out")
        raise EngineError(f"environment {fact}. With on_failure: exclude such conversations are left out.")

    def _framed(self, texts: Sequence[str]) -> list[list[int]]:
        """What the environment says, as tokens, within the frame. What looks like a special token in a text is none: a
        tool may say what the model told it to."""
        before, after = self._tokens(self._node.frame.split("{}"))
        return [[*before, *ids, *after] for ids in self._tokens(texts, split_special_tokens=True)] if texts else []

    def _tokens(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        """Raises RecipeError."""
        try:
            ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, **options)["input_ids"]
        except Exception as error:  # tokenizers have no base of their own
            fact = f"the tokenizer refuses what '{self._node.environment}' says ({first_line(error)})"
            raise RecipeError("environment", fact, fix="characters that the model knows") from None
        return ids

    def _token(self, marker: str) -> int:
        ids = self._tokens([marker])[0]
        if len(ids) != 1:
            raise RecipeError(
                "stop", f"{marker!r} is {len(ids)} tokens, and a turn ends with one", fix="a marker that is one token"
            )
        return ids[0]
