"""What travels on the edges of the graph.

Ragged data is packed, never padded: one array a field, with offsets. Every row has a key (step, prompt, sample)
that it keeps for life; results stand in the order of keys, never of arrival.

Shapes: P prompts, G group, B rollouts (P x G), T tokens (of all rows together).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of different lengths in one array: row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Array
    """[T]"""
    offsets: NDArray[np.int64]
    """[rows + 1], beginning with 0."""

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | Array], dtype: DTypeLike) -> "Packed":
        arrays = [np.asarray(row, dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, offsets_of([len(array) for array in arrays]))

    @classmethod
    def joined(cls, parts: Sequence["Packed"]) -> "Packed":
        """The rows of all parts, one part after another."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows]"""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> "Packed":
        """These rows, in this order."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        places = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Packed(self.values[places], offsets)

    def like(self, values: Array) -> "Packed":
        """Other values, ``[T]``, cut at the same places."""
        assert len(values) == len(self.values)
        return Packed(values, self.offsets)


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows + 1] from [rows]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts:
    keys: NDArray[np.int64]
    """[P, 3]: step, prompt, 0."""
    ids: Packed
    """P rows of int32 token ids."""
    rows: tuple[Mapping[str, Any], ...]
    """P rows of the data set: what a reward function compares with."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: NDArray[np.int64]) -> "Prompts":
        """These rows, in this order."""
        return Prompts(keys=self.keys[rows], ids=self.ids.take(rows), rows=tuple(self.rows[row] for row in rows))

    def repeat(self, group_size: int) -> "Prompts":
        """[B]: each prompt ``group_size`` times, its keys counting the samples."""
        repeated = self.take(np.repeat(np.arange(len(self)), group_size))
        repeated.keys[:, 2] = np.tile(np.arange(group_size), len(self))
        return repeated


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences:
    """Prompts with a response each: what a model scores and trains on."""

    keys: NDArray[np.int64]
    """[B, 3]: step, prompt, sample."""
    prompt_ids: Packed
    """B rows of int32 token ids."""
    response_ids: Packed
    """B rows of int32 token ids, at least one each, with the end token where there is one."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: NDArray[np.int64]) -> "Sequences":
        """These rows, in this order, without what a subclass adds."""
        return Sequences(
            keys=self.keys[rows], prompt_ids=self.prompt_ids.take(rows), response_ids=self.response_ids.take(rows)
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples(Sequences):
    """Prompts with the response to be imitated."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts(Sequences):
    """Prompts with responses that a model wrote."""

    logprobs: Packed
    """B rows of float32: of each response token, by the engine that sampled it, at its temperature."""
    versions: Packed
    """B rows of int32: the policy version that wrote each response token."""
    finished: NDArray[np.bool_]
    """[B]: False where the response was cut at the limit."""
    temperature: float
    """What the logits were divided by; whoever scores or trains on these rollouts does the same."""
    texts: tuple[str, ...]
    """B responses as text, without special tokens."""
    rows: tuple[Mapping[str, Any], ...]
    """B rows of the data set."""

    @classmethod
    def joined(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """All parts, one after another; they have one temperature."""
        packed = ("prompt_ids", "response_ids", "logprobs", "versions")
        return cls(
            **{name: Packed.joined([getattr(part, name) for part in parts]) for name in packed},
            keys=np.concatenate([part.keys for part in parts]),
            finished=np.concatenate([part.finished for part in parts]),
            temperature=parts[0].temperature,
            texts=tuple(text for part in parts for text in part.texts),
            rows=tuple(row for part in parts for row in part.rows),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Minibatch(Sequences):
    """What one optimizer step trains on."""

    columns: Mapping[str, Packed]
    """What the loss reads besides the model's own logprobs: B rows of float32 each, a value a response token."""
    weights: Packed
    """B rows of float32: what each response token counts in the loss. They add up to one, so that the gradient
    does not depend on how the minibatch is cut."""

    def take(self, rows: NDArray[np.int64]) -> "Minibatch":
        return Minibatch(
            **vars(super().take(rows)),
            columns={name: column.take(rows) for name, column in self.columns.items()},
            weights=self.weights.take(rows),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards:
    values: NDArray[np.float32]
    """[B]"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Logprobs:
    values: Packed
    """B rows of float32, a value a response token."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueEstimates:
    values: Packed
    """B rows of float32, a value a response token: the return expected before that token is written."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Advantages:
    values: NDArray[np.float32]
    """[B], the same for every token of a rollout."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    values: Mapping[str, float]
