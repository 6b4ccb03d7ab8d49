"""Gives each step its prompts, examples or pairs from the rows of a data set.

A position counts the rows of a run: rows of all epochs, in the order in which training uses them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import (
    Examples,
    Packed,
    Pairs,
    Prompts,
    Repeated,
    Rollouts,
    Sequences,
    Thumbnail,
    images_of,
    pack_images,
)
from rlflow.batch.segments import segment_numbers, unfold
from rlflow.data.encoding import UNKNOWN_READER, Encoded, Reader, encode
from rlflow.data.image_prompts import Images, shown_text
from rlflow.data.loading import at_evaluation_set
from rlflow.data.mistakes import Rows
from rlflow.recipe import Data
from rlflow.rewards.styles import RENDERED_PROMPT, SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlflow.engines.vision.base import VisionFamily

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
    trained: Packed | None = None
    """The tokens of examples that are trained on, as rows of bool; None for all."""
    rejected_ids: Packed | None = None
    """The rejected responses of pairs."""
    images: Sequence[Images] | None = None
    """The images of each prompt, if the data set has any."""
    warnings: tuple[str, ...] = ()
    """Messages about prompts that were too long."""
    resumed_at: tuple[int, int] = (0, 0)
    """The step that the run resumed at, and the rows used before it, in case ``batch_size`` was changed."""
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """The tokenizer of all ids, which ``texts`` needs."""
    vision: "VisionFamily | None" = None
    """How the model sees images; None if no row has any."""
    renders_prompts: bool = False
    """Rows of prompts have the text that the model reads as a column."""

    def prompts(self, step: int) -> Prompts:
        """Return ``batch_size`` prompts for ``step``, counted from 0."""
        return self.prompts_from(self._position(step), step, 0, self.data.batch_size)

    def prompts_from(self, position: int, step: int, first: int, count: int) -> Prompts:
        """Return ``count`` prompts from ``position``, with keys of ``step`` that are numbered from ``first``."""
        return self.prompts_of(self._rows_at(np.arange(position, position + count)), step, first)

    def prompts_of(self, rows: NDArray[np.int64], step: int, first: int) -> Prompts:
        """Return the prompts of these rows, with keys of ``step`` that are numbered from ``first``."""
        keys = _keys(step, len(rows))
        keys[:, 1] += first
        chosen = tuple(self.rows[int(row)] for row in rows)
        images = _read_images(self.images, rows)
        return self._rendered(Prompts(keys=keys, ids=self.prompt_ids.take(rows), rows=chosen, images=images))

    def labels(self, column: str | None) -> list[str]:
        """Return the value of a column in each row as text; the same text for all rows without a column."""
        return ["" if column is None else str(row[column]) for row in self.rows]

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
            prompt, response = self._prompt_text(segments, row), self._text(segments.response_ids[row])
            if number:
                following = f"\n[segment {number + 1}]\n{prompt}{response}"
                prompt, before = texts.pop()
                response = _shorten(before + following)
            texts.append((prompt, response))
        return texts

    def thumbnails(self, sequences: Sequences) -> list[tuple[Thumbnail, ...]]:
        """Return small pictures of the images of each row."""
        rows = range(len(sequences))
        images = [() if sequences.images is None else images_of(sequences.images, row) for row in rows]
        return [tuple(image.thumbnail() for image in of_row) for of_row in images]

    def examples(self, step: int) -> Examples:
        """Return ``batch_size`` prompts with their responses for ``step``, counted from 0."""
        assert self.response_ids is not None
        rows = self._rows_at(np.arange(self._position(step), self._position(step + 1)))
        return Examples(
            keys=_keys(step, len(rows)),
            prompt_ids=self.prompt_ids.take(rows),
            response_ids=self.response_ids.take(rows),
            trained=None if self.trained is None else Repeated.from_packed(self.trained.take(rows)),
            images=_read_images(self.images, rows),
        )

    def pairs(self, step: int) -> Pairs:
        """Return ``batch_size`` pairs for ``step``, counted from 0."""
        assert self.response_ids is not None
        assert self.rejected_ids is not None
        rows = self._rows_at(np.arange(self._position(step), self._position(step + 1)))
        prompts, chosen, rejected = (ids.take(rows) for ids in (self.prompt_ids, self.response_ids, self.rejected_ids))
        return make_pairs(_keys(step, len(rows)), prompts, chosen, rejected, _read_images(self.images, rows))

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

    def _prompt_text(self, sequences: Sequences, row: int) -> str:
        ids, images = sequences.prompt_ids[row], sequences.images
        if images is None or self.vision is None or self.tokenizer is None:
            return self._text(ids)
        decode = self.tokenizer.decode
        return _shorten(shown_text(ids, images_of(images, row), self.vision, lambda part: decode(part.tolist())))

    def _text(self, ids: NDArray[np.int32]) -> str:
        assert self.tokenizer is not None
        return _shorten(self.tokenizer.decode(ids.tolist()))

    def _position(self, step: int) -> int:
        """Return the position where ``step`` begins."""
        first_step, rows = self.resumed_at
        return rows + (step - first_step) * self.data.batch_size

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
    edge: SourceEdge = "prompts",
    held_out: Mapping[str, tuple[Data, Rows]] | None = None,
    reader: Reader = UNKNOWN_READER,
) -> DataSource:
    """Encode all rows of training and evaluation for an ``edge`` of the graph. Raises RecipeError.

    ``held_out`` has the rows of each evaluation set, with the data that they come from.
    """
    names = _RESPONSES[edge]
    train = encode(data, tokenizer, rows, "split", names, reader)
    sets: dict[str, Prompts | Pairs] = {}
    warnings = [*train.warnings]
    for name, (of_set, held_out_rows) in (held_out or {}).items():
        with at_evaluation_set(name):
            responses = names if edge == "pairs" else ()
            encoded = encode(of_set, tokenizer, held_out_rows, "eval_split", responses, reader)
        sets[name] = _held_out_set(encoded, edge)
        warnings += encoded.warnings
    return DataSource(
        data,
        seed,
        train.rows,
        train.prompt_ids,
        train.responses[0] if names else None,
        sets,
        train.trained,
        train.responses[1] if edge == "pairs" else None,
        train.images,
        warnings=tuple(warnings),
        tokenizer=tokenizer,
        vision=train.vision,
    )


def make_pairs(
    keys: NDArray[np.int64], prompt_ids: Packed, chosen_ids: Packed, rejected_ids: Packed, images: Packed | None = None
) -> Pairs:
    """Combine prompts with their chosen and rejected responses; ``keys`` [P, 3] are the keys of the prompts."""
    both = np.repeat(np.arange(len(keys)), 2)
    pair_keys = keys[both]
    pair_keys[1::2, 2] = 1
    # The chosen and the rejected responses alternate.
    alternating = np.arange(2 * len(keys)).reshape(2, -1).T.ravel()
    return Pairs(
        keys=pair_keys,
        prompt_ids=prompt_ids.take(both),
        response_ids=Packed.concatenate([chosen_ids, rejected_ids]).take(alternating),
        images=None if images is None else images.take(both),
    )


def _held_out_set(encoded: Encoded, edge: SourceEdge) -> Prompts | Pairs:
    """Return all rows of an evaluation set."""
    keys = _keys(0, len(encoded.rows))
    images = _read_images(encoded.images, range(len(keys)))
    if edge == "pairs":
        chosen, rejected = encoded.responses
        return make_pairs(keys, encoded.prompt_ids, chosen, rejected, images)
    return Prompts(keys=keys, ids=encoded.prompt_ids, rows=tuple(encoded.rows), images=images)


def _read_images(images: Sequence[Images] | None, rows: Iterable[int]) -> Packed | None:
    """Return the images of some rows as a column; None for a data set without any."""
    return None if images is None else pack_images([[image.read() for image in images[row]] for row in rows])


def _keys(step: int, count: int) -> NDArray[np.int64]:
    return np.stack([np.full(count, step), np.arange(count), np.zeros(count, np.int64)], axis=1)
