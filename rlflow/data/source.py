"""Gives each step its prompts, examples or pairs from the rows of a data set.

A position counts the rows of a run: rows of all epochs, in the order in which training uses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Examples, Packed, Pairs, Prompts, Repeated, Rollouts, Sequences
from rlflow.batch.segments import segment_numbers, unfold
from rlflow.data.encoding import Rows, encode, make_pairs
from rlflow.data.loading import at_evaluation_set
from rlflow.recipe import Data
from rlflow.rewards.styles import RENDERED_PROMPT, SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The characters of a text for people, at most, so that the samples of long runs need little disk space.
_MAX_CHARACTERS = 2**15
SourceEdge = Literal["prompts", "examples", "pairs"]
# The columns of responses that each edge needs.
_RESPONSES: Mapping[SourceEdge, tuple[str, ...]] = {
    "prompts": (),
    "examples": ("response",),
    "pairs": ("chosen", "rejected"),
}


@dataclass(frozen=True, eq=False)
class DataSource:
    """The training rows, shuffled in each epoch by the seed. It has no state: every method takes the step."""

    data: Data
    seed: int
    rows: Rows
    prompt_ids: Packed
    response_ids: Packed | None
    """The responses of examples, or the chosen responses of pairs."""
    held_out: Mapping[str, Prompts | Pairs]
    """The held-out rows of each evaluation set; the one of ``eval_split`` has an empty name."""
    rejected_ids: Packed | None = None
    """The rejected responses of pairs."""
    warnings: tuple[str, ...] = ()
    """Messages about prompts that were too long."""
    resumed_at: tuple[int, int] = (0, 0)
    """The step that the run resumed at, and the rows used before it, in case ``batch_size`` was changed."""
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """The tokenizer of all ids, which ``texts`` needs."""
    renders_prompts: bool = False
    """Rows of prompts have the text that the model reads as a column."""

    def prompts(self, step: int) -> Prompts:
        """Return ``batch_size`` prompts for ``step``, counted from 0."""
        first, end = self._position(step), self._position(step + 1)
        return self._prompts_at(_keys(step, end - first), np.arange(first, end))

    def prompts_from(self, position: int, step: int, first: int, count: int) -> Prompts:
        """Return ``count`` prompts from ``position``, with keys of ``step`` that are numbered from ``first``."""
        keys = _keys(step, count)
        keys[:, 1] += first
        return self._prompts_at(keys, np.arange(position, position + count))

    def copy_locally(self, rollouts: Rollouts) -> Rollouts:
        """Copy rollouts out of the object store into this object's process, which has put their images there."""
        return rollouts.map_packed(
            lambda column: (
                column
                if column is rollouts.images or isinstance(column, Repeated)
                else Packed(column.values, column.offsets)
            )
        )

    def texts(self, sequences: Sequences) -> list[tuple[str, str]]:
        """Return the prompt and the response of each row with special tokens; long ones with a gap in the middle.

        Segments after a row's first follow in the response, each with a headline and its own prompt.
        """
        segments = unfold(sequences)
        texts: list[tuple[str, str]] = []
        for row, number in enumerate(segment_numbers(sequences)):
            prompt, response = self._text(segments.prompt_ids[row]), self._text(segments.response_ids[row])
            if number:
                following = f"\n[segment {number + 1}]\n{prompt}{response}"
                prompt, before = texts.pop()
                response = _shorten(before + following)
            texts.append((prompt, response))
        return texts

    def examples(self, step: int) -> Examples:
        """Return ``batch_size`` prompts with their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        rows = self._rows_at(np.arange(self._position(step), self._position(step + 1)))
        return Examples(
            keys=_keys(step, len(rows)),
            prompt_ids=self.prompt_ids.take(rows),
            response_ids=self.response_ids.take(rows),
        )

    def pairs(self, step: int) -> Pairs:
        """Return ``batch_size`` pairs for ``step``, counted from 0."""
        assert self.response_ids is not None
        assert self.rejected_ids is not None
        rows = self._rows_at(np.arange(self._position(step), self._position(step + 1)))
        columns = [ids.take(rows) for ids in (self.prompt_ids, self.response_ids, self.rejected_ids)]
        return make_pairs(_keys(step, len(rows)), *columns)

    def held_out_prompts(self, evaluation_set: str = "") -> Prompts:
        """Return all held-out prompts of an evaluation set, in the order of the data set."""
        held_out = self.held_out[evaluation_set]
        assert isinstance(held_out, Prompts)
        return self._rendered(held_out)

    def held_out_pairs(self, evaluation_set: str = "") -> Pairs:
        """Return all held-out pairs of an evaluation set, in the order of the data set."""
        held_out = self.held_out[evaluation_set]
        assert isinstance(held_out, Pairs)
        return held_out

    def _text(self, ids: NDArray[np.int32]) -> str:
        assert self.tokenizer is not None
        return _shorten(self.tokenizer.decode(ids.tolist()))

    def _position(self, step: int) -> int:
        """Return the position where ``step`` begins."""
        first_step, rows = self.resumed_at
        return rows + (step - first_step) * self.data.batch_size

    def _prompts_at(self, keys: NDArray[np.int64], positions: NDArray[np.int64]) -> Prompts:
        rows = self._rows_at(positions)
        chosen = tuple(self.rows[int(row)] for row in rows)
        return self._rendered(Prompts(keys=keys, ids=self.prompt_ids.take(rows), rows=chosen))

    def _rendered(self, prompts: Prompts) -> Prompts:
        if not self.renders_prompts:
            return prompts
        assert self.tokenizer is not None
        texts = [self.tokenizer.decode(prompts.ids[row].tolist()) for row in range(len(prompts))]
        tokens = self.tokenizer.added_tokens_decoder.items()
        special_tokens = {token_id: token.content for token_id, token in tokens if token.special}
        rows = tuple(
            {**row, RENDERED_PROMPT: text, SPECIAL_TOKENS: special_tokens}
            for row, text in zip(prompts.rows, texts, strict=True)
        )
        return replace(prompts, rows=rows)

    def _rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs = positions // len(self.rows)
        orders = {
            epoch: np.random.default_rng([self.seed, int(epoch)]).permutation(len(self.rows)) for epoch in set(epochs)
        }
        return np.array(
            [orders[epoch][position % len(self.rows)] for epoch, position in zip(epochs, positions, strict=True)]
        )


def _shorten(text: str) -> str:
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


def open_training_data(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    seed: int,
    *,
    num_embeddings: int | None = None,
    edge: SourceEdge = "prompts",
    held_out: Mapping[str, tuple[Data, Rows]] | None = None,
) -> DataSource:
    """Encode all rows of training and evaluation for an ``edge`` of the graph. Raises RecipeError.

    ``held_out`` has the rows of each evaluation set, with the data that they come from, and ``num_embeddings`` is the
    number of tokens that the model has embeddings for.
    """
    names = _RESPONSES[edge]
    train = encode(data, tokenizer, rows, "split", names, num_embeddings)
    sets: dict[str, Prompts | Pairs] = {}
    warnings = [*train.warnings]
    for name, (of_set, held_out_rows) in (held_out or {}).items():
        with at_evaluation_set(name):
            responses = names if edge == "pairs" else ()
            encoded = encode(of_set, tokenizer, held_out_rows, "eval_split", responses, num_embeddings)
        keys = _keys(0, len(encoded.rows))
        prompts = Prompts(keys=keys, ids=encoded.prompt_ids, rows=tuple(encoded.rows))
        sets[name] = make_pairs(keys, encoded.prompt_ids, *encoded.responses) if edge == "pairs" else prompts
        warnings += encoded.warnings
    return DataSource(
        data,
        seed,
        train.rows,
        train.prompt_ids,
        train.responses[0] if names else None,
        sets,
        train.responses[1] if edge == "pairs" else None,
        warnings=tuple(warnings),
        tokenizer=tokenizer,
    )


def _keys(step: int, count: int) -> NDArray[np.int64]:
    return np.stack([np.full(count, step), np.arange(count), np.zeros(count, np.int64)], axis=1)
