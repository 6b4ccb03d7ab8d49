"""The other side of conversations: environments, the tokenizer, and what was said so far.

Shapes: B conversations.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.environments.turn import Answer
from rlflow.errors import EngineError, RecipeError, first_line
from rlflow.nodes.transcripts import Transcripts
from rlflow.nodes.turn_taking import TurnTaking
from rlflow.recipe import Model
from rlflow.rewards.base import Failure
from rlflow.rewards.pool.calls import Call
from rlflow.rewards.pool.pool import Pool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    def _pool(self) -> Pool:
        """Of processes that live as long as this is used."""
        return Pool({self._node.environment: self._node.turns})

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_tokenizer(self._model_name, self._model)

    def _answers(self, asking: Mapping[int, str]) -> Iterator[tuple[int, Answer | Failure]]:
        """To the turns of these conversations, in any order."""
        assert self._transcripts is not None
        rows, name = list(asking), self._node.environment
        size = self._pool.found[name].batch_size
        calls = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            begun = [(self._transcripts.rows[row], self._states.get(row)) for row in part]
            calls.append(Call(name, part, [asking[row] for row in part], begun))
        with closing(self._pool.outcomes(calls)) as outcomes:
            for call, answers in outcomes:
                yield from zip(call.places, answers, strict=True)

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
