"""What travels on the edges of the graph.

Ragged data is packed, never padded: one array a field, with offsets. Every row has a key (step, prompt, sample)
that it keeps for life; results stand in the order of keys, never of arrival.

Shapes: P prompts, G group, B rollouts (P x G), T tokens (of all rows together).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlflow.packed import Packed, Records, Repeated, compact, expanded

__all__ = [
    "Advantages",
    "Batch",
    "Divergences",
    "Examples",
    "Logprobs",
    "Metrics",
    "Minibatch",
    "Packed",
    "Pairs",
    "Prompts",
    "Records",
    "Repeated",
    "Rewards",
    "RolloutAdvantages",
    "Rollouts",
    "Sequences",
    "SummedRewards",
    "TokenAdvantages",
    "ValueEstimates",
]

Rows = NDArray[np.integer[Any]]


class Batch:
    """Rows of several fields, each of which has as many rows; numbers and None are of the whole batch.

    A field is an array [rows, ...], Packed, a mapping of either, or a sequence of texts or of rows of the data set.
    What is declared as Repeated travels as such, and takes no room in a store.
    """

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def take(self, rows: Rows) -> Self:
        """These rows, in this order."""
        return self._each(lambda value: _taken(value, rows))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All parts, one after another; what is of the whole batch is that of the first."""
        if len(parts) == 1:
            return parts[0]
        fields = {name: _joined([getattr(part, name) for part in parts]) for name in vars(parts[0])}
        return cls(**fields)

    def mapped(self, function: Callable[[Packed], Packed]) -> Self:
        """With ``function`` applied to every packed field; texts and rows are packed for it."""
        return self._each(lambda value: _mapped(value, function))

    def _each(self, function: Callable[[Any], Any]) -> Self:
        changed: Self = replace(self, **{name: function(value) for name, value in vars(self).items()})  # type: ignore[type-var]
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {
            name: compact(value) if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        }
        return _restored, (type(self), fields)


def _restored(kind: type[Batch], fields: Mapping[str, Any]) -> Batch:
    return kind(**{name: expanded(value) for name, value in fields.items()})


def _taken(value: Any, rows: Rows) -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, Packed | Records):
        return value.take(rows)
    if isinstance(value, Mapping):
        return {name: _taken(column, rows) for name, column in value.items()}
    return tuple(value[row] for row in rows) if isinstance(value, Sequence) else value


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Packed):
        return Packed.joined(values)
    if isinstance(first, Mapping):
        return {name: _joined([value[name] for value in values]) for name in first}
    if all(isinstance(value, Records) for value in values):
        return Records.joined(values)
    return tuple(item for value in values for item in value) if isinstance(first, Sequence) else first


def _mapped(value: Any, function: Callable[[Packed], Packed]) -> Any:
    if isinstance(value, Packed):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _mapped(column, function) for name, column in value.items()}
    if isinstance(value, Sequence):
        records = value if isinstance(value, Records) else Records.of(value)
        return Records(function(records.column))
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Batch):
    keys: NDArray[np.int64]
    """[P, 3]: step, prompt, 0."""
    ids: Packed
    """P rows of int32 token ids."""
    rows: Sequence[Mapping[str, Any]]
    """P rows of the data set: what a reward function compares with."""

    def repeat(self, group_size: int) -> "Prompts":
        """[B]: each prompt ``group_size`` times, its keys counting the samples on from those that are there."""
        repeated = self.take(np.repeat(np.arange(len(self)), group_size))
        repeated.keys[:, 2] += np.tile(np.arange(group_size), len(self))
        return repeated


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences(Batch):
    """Prompts with a response each: what a model scores and trains on."""

    keys: NDArray[np.int64]
    """[B, 3]: step, prompt, sample."""
    prompt_ids: Packed
    """B rows of int32 token ids."""
    response_ids: Packed
    """B rows of int32 token ids, at least one each, with the end token where there is one."""
    together: int = 1
    """So many neighbouring rows are in one minibatch, on one rank and in one pass: a loss compares them."""

    def bare(self) -> "Sequences":
        """Without what a subclass adds."""
        return Sequences(
            keys=self.keys, prompt_ids=self.prompt_ids, response_ids=self.response_ids, together=self.together
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples(Sequences):
    """Prompts with the response to be imitated."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs(Sequences):
    """Prompts with two responses each, which are neighbours: the chosen one is sample 0, the rejected one 1."""

    together: int = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts(Sequences):
    """Prompts with responses that a model wrote."""

    logprobs: Packed
    """B rows of float32: of each response token, by the engine that sampled it, at its temperature."""
    versions: Repeated
    """B rows of int32: the policy version that wrote each response token, mostly one a row."""
    finished: NDArray[np.bool_]
    """[B]: False where the response was cut at the limit."""
    temperature: float
    """What the logits were divided by; whoever scores or trains on these rollouts does the same."""
    texts: Sequence[str]
    """B responses as text, without special tokens."""
    rows: Sequence[Mapping[str, Any]]
    """B rows of the data set."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Minibatch(Sequences):
    """What one optimizer step trains on."""

    step: int
    """Of the run, counted from 0: the learning rate follows from it."""
    columns: Mapping[str, Packed]
    """What the loss reads besides the model's own logprobs: B rows of float32 each, a value a response token."""
    weights: Packed
    """B rows of float32: what each response token counts in the loss. They are made of the whole minibatch, so that
    the gradient does not depend on how it is cut."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards(Batch):
    values: NDArray[np.float32]
    """[B], NaN where there is none: such a rollout is excluded, as if it had not been written."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SummedRewards(Rewards):
    """Weighted sums of parts."""

    parts: Mapping[str, NDArray[np.float32]]
    """[B] each, before its weight; NaN where it failed."""
    reasons: NDArray[np.str_]
    """[B], why a part failed, whatever came of it; empty where none did."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergences(Batch):
    values: NDArray[np.float32]
    """[B]: the KL divergence from a reference in nats, summed over each response."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Logprobs(Batch):
    values: Packed
    """B rows of float32, a value a response token."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueEstimates(Batch):
    values: Packed
    """B rows of float32, a value a response token: the return expected before that token is written."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Advantages(Batch):
    values: Packed
    """B rows of float32, a value a response token."""

    @property
    def known(self) -> NDArray[np.bool_]:
        """[B]: False for a rollout that is excluded, which is not trained on."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutAdvantages(Advantages):
    """The same for every token of a rollout; NaN for one that is excluded."""

    values: Repeated

    @property
    def known(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values.each)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenAdvantages(Advantages):
    """Of each token, which may be elsewhere."""

    excluded: NDArray[np.bool_]
    """[B]"""

    @property
    def known(self) -> NDArray[np.bool_]:
        return ~self.excluded


@dataclass(frozen=True, kw_only=True)
class Metrics:
    values: Mapping[str, float]
