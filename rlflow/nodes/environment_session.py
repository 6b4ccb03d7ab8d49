"""The other side of a conversation: the environment, the tokenizer, and the transcript so far.

Shapes: B conversations, T tokens of a piece.
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
from rlflow.rewards.pool import Call, ProcessPool
from rlflow.schema import Count, Section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = NDArray[np.int64]

# Bits of a key's number for the sample, and for the prompt: a step has fewer prompts, and a prompt fewer samples.
_BITS = 20


@dataclass(frozen=True, kw_only=True)
class TurnOptions(Section):
    """The options of a conversation's turns."""

    environment: str
    """A name from rlflow.environments.classes, or ``package.module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    max_turns: Count
    """The limit of the model's turns."""
    turn_tokens: Count
    """The limit of one turn of the model, in tokens."""
    max_tokens: Count
    """The limit of the whole response, in tokens; the environment's tokens count."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, each a single token, as the model's own end token does."""
    frame: str = "{}"
    """The text around the environment's answer, which stands in the place of the braces: the role markers of a chat
    template."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """The time limit of one call of the environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """The result of a failing environment: the run stops, or the response is excluded from training."""

    @property
    def environment_spec(self) -> EnvironmentSpec:
        """Return the environment as worker processes build it."""
        return EnvironmentSpec(self.environment, self.options, self.timeout_s)


class EnvironmentSession:
    """The conversations of one converse node. It lives where tokens are, which on Ray is a process of its own."""

    def __init__(self, options: TurnOptions, model_name: str, model: Model) -> None:
        """Take the options of the node, and name and model of its role, whose tokenizer is used."""
        self._options, self._model_name, self._model = options, model_name, model
        self._transcripts: Transcripts | None = None
        self._states: dict[int, bytes] = {}

    def start(self) -> tuple[int, ...]:
        """Start a new generation, and return the tokens that end a turn. Raise RecipeError at ``stop``."""
        self._transcripts = None
        self._states.clear()
        return tuple(self._stop_token(text) for text in self._options.stop)

    def answer(self, turns: Rollouts) -> Prompts | None:
        """Let the environment answer the model's turns, and return the prompts of the next turns.

        Only conversations that continue have a next prompt; without any, return None. Raise EngineError or RecipeError
        for an environment that fails, with ``on_failure: stop``.
        """
        if self._transcripts is None:
            self._transcripts = Transcripts(turns)
        transcripts = self._transcripts
        rows = transcripts.add_turns(turns)
        turn_texts = {row: transcripts[row].text for row in rows[turns.finished].tolist()}
        answers: dict[int, str] = {}
        for row, answer in self._call_environment(turn_texts):
            if isinstance(answer, Failure):
                transcripts[row].reason = self._failure_reason(answer)
                continue
            transcripts[row].reward += answer.reward
            transcripts[row].finished = answer.done
            self._states[row] = answer.state
            if not answer.done and transcripts[row].num_turns < self._options.max_turns:
                answers[row] = answer.text
        continuing = []
        for row, ids in zip(answers, self._frame(list(answers.values())), strict=True):
            if transcripts[row].length + len(ids) + self._options.turn_tokens <= self._options.max_tokens:
                transcripts.add_answer(row, ids)
                continuing.append(row)
        return transcripts.next_prompts(sorted(continuing)) if continuing else None

    def conversations(self) -> Conversations:
        """Return the B conversations of this generation, in the order of the first turns."""
        assert self._transcripts is not None
        return self._transcripts.conversations()

    def __getstate__(self) -> Mapping[str, Any]:
        """Leave out worker processes and the tokenizer, which the process that uses them starts and loads itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_pool", "_tokenizer")}

    @cached_property
    def _pool(self) -> ProcessPool:
        """Start worker processes, which live as long as the session."""
        return ProcessPool({self._options.environment: self._options.environment_spec})

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_tokenizer(self._model_name, self._model)

    def _call_environment(self, turn_texts: Mapping[int, str]) -> Iterator[tuple[int, TurnResult | Failure]]:
        """Yield the row and the answer of each conversation in ``turn_texts``, in any order."""
        assert self._transcripts is not None
        rows, name = list(turn_texts), self._options.environment
        size = self._pool.callables[name].batch_size
        calls = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            states = [(self._transcripts.rows[row], self._states.get(row)) for row in part]
            calls.append(Call(name, part, [turn_texts[row] for row in part], states))
        with closing(self._pool.outcomes(calls)) as outcomes:
            for call, answers in outcomes:
                yield from zip(call.indices, answers, strict=True)

    def _failure_reason(self, failure: Failure) -> str:
        """Return why the environment failed. Raise RecipeError or EngineError with ``on_failure: stop``."""
        fact = f"'{self._options.environment}' {failure.reason}"
        if self._options.on_failure == "exclude":
            return fact
        if failure.kind in ("raised", "invalid"):
            raise RecipeError("environment", fact, fix="on_failure: exclude leaves such conversations out")
        raise EngineError(f"environment {fact}. With on_failure: exclude such conversations are left out.")

    def _frame(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the environment's answers as tokens, within the frame.

        Special tokens inside an answer are encoded as plain text: a tool may repeat what the model told it to.
        """
        before, after = self._tokenize(self._options.frame.split("{}"))
        return [[*before, *ids, *after] for ids in self._tokenize(texts, split_special_tokens=True)] if texts else []

    def _tokenize(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        """Return the tokens of each text. Raise RecipeError for a text that the tokenizer refuses."""
        try:
            ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, **options)["input_ids"]
        except Exception as error:  # tokenizers have no base class for their errors
            fact = f"the tokenizer refuses the output of '{self._options.environment}' ({first_line(error)})"
            raise RecipeError("environment", fact, fix="use characters that the model knows") from None
        return ids

    def _stop_token(self, text: str) -> int:
        ids = self._tokenize([text])[0]
        if len(ids) != 1:
            raise RecipeError(
                "stop", f"expected a single token, got {text!r}, which is {len(ids)}", fix="a text that is one token"
            )
        return ids[0]


@dataclass(frozen=True)
class _Piece:
    """A turn of the model or an answer of the environment, as tokens: [T] each."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    own: bool


@dataclass
class Transcript:
    """One conversation so far."""

    pieces: list[_Piece] = field(default_factory=list)
    text: str = ""
    """The model's last turn."""
    reward: float = 0.0
    reason: str = ""
    finished: bool = False

    @property
    def length(self) -> int:
        """Return the number of tokens of both sides."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def num_turns(self) -> int:
        """Return the number of the model's turns."""
        return sum(piece.own for piece in self.pieces)


class Transcripts:
    """B conversations, each of which starts with a turn of the model."""

    def __init__(self, first: Rollouts) -> None:
        self._first = first
        self._all = [Transcript() for _ in range(len(first))]
        self._prompts = _copy_rows(first.prompt_ids)
        self.rows = tuple(first.rows)
        """[B], rows of the data set."""
        self._turn = 0
        _, prompt, sample = first.keys.T
        # The number of a conversation within its step.
        self._numbers = (prompt << _BITS) + sample

    def __getitem__(self, row: int) -> Transcript:
        return self._all[row]

    def add_turns(self, turns: Rollouts) -> Ints:
        """Add a turn of the model to some conversations, and return which of the B conversations these are."""
        numbers = turns.keys[:, 1] - (self._turn << 2 * _BITS)
        rows = np.searchsorted(self._numbers, numbers) if self._turn else np.arange(len(self._all))
        columns = (_copy_rows(column) for column in (turns.response_ids, turns.logprobs, turns.versions))
        for row, text, ids, logprobs, versions in zip(rows.tolist(), turns.texts, *columns, strict=True):
            self._all[row].pieces.append(_Piece(ids, logprobs, versions, own=True))
            self._all[row].text = text
        self._turn += 1
        return rows

    def add_answer(self, row: int, ids: Sequence[int]) -> None:
        """Add the tokens of the environment's answer to a conversation."""
        tokens = np.asarray(ids, np.int32)
        version = self._all[row].pieces[-1].versions[-1]
        logprobs = np.zeros(len(tokens), np.float32)
        self._all[row].pieces.append(_Piece(tokens, logprobs, np.full(len(tokens), version, np.int32), own=False))

    def next_prompts(self, rows: Sequence[int]) -> Prompts:
        """Return all tokens so far of these conversations, as prompts of their next turn.

        Each has a prompt number that no other turn of the step has, so that its random draws are its own.
        """
        keys = np.zeros((len(rows), 3), np.int64)
        keys[:, 0] = self._first.keys[list(rows), 0]
        keys[:, 1] = (self._turn << 2 * _BITS) + self._numbers[list(rows)]
        tokens = [[self._prompts[row], *(piece.ids for piece in self._all[row].pieces)] for row in rows]
        return Prompts(keys=keys, ids=Packed.from_rows(map(np.concatenate, tokens), np.int32), rows=({},) * len(rows))

    def conversations(self) -> Conversations:
        """Return all conversations so far."""
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
            turns=np.array([each.num_turns for each in every], np.int64),
            reasons=np.array([each.reason for each in every], np.str_),
        )


def _copy_rows(column: Packed) -> list[NDArray[np.generic]]:
    """Return copies of the rows, so that blocks of the object store can be freed."""
    return np.split(np.array(column.values), column.offsets[1:-1])
