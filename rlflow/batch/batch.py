"""The batches that nodes of the graph pass to each other.

Fields with rows of different lengths are packed, never padded: one array with offsets. Every row has a key (step,
prompt, sample) that never changes. Results are ordered by key, never by arrival.

Shapes: P prompts, G group size, B rollouts (P x G), T tokens in all rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.packed import Packed, Repeated
from rlflow.batch.rows import Batch
from rlflow.errors import EngineError, NotFiniteError
from rlflow.resources.time.lengths import QUANTILES

# The number of samples that a message lists.
_MAX_LISTED = 3
# Smaller advantages are rounding errors of zero.
_ZERO = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(Batch):
    """Tokenized prompts of one step, with their rows of the data set."""

    keys: NDArray[np.int64]
    """[P, 3]: step, prompt, 0."""
    ids: Packed
    """P rows of int32 token ids."""
    rows: Sequence[Mapping[str, Any]]
    """P rows of the data set, which reward functions compare responses with."""
    images: Packed | None = None
    """P rows of uint8: the images of each prompt (``images.images_of``). None for a data set without images."""

    def repeat(self, group_size: int) -> "Prompts":
        """Return each prompt ``group_size`` times, [B]. Sample numbers in the keys count up from the prompt's own."""
        repeated = self.take(np.repeat(np.arange(len(self)), group_size))
        repeated.keys[:, 2] += np.tile(np.arange(group_size), len(self))
        return repeated


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences(Batch):
    """Prompts with one response each, which a model scores or trains on.

    A response may consist of several segments, each with a prompt of its own: then ``prompt_ids`` and ``response_ids``
    have those of all segments, one after another. A model reads a segment as a sequence of its own
    (``segments.unfold``); for all others the response is one row.
    """

    keys: NDArray[np.int64]
    """[B, 3]: step, prompt, sample."""
    prompt_ids: Packed
    """B rows of int32 token ids."""
    response_ids: Packed
    """B rows of int32 token ids, at least one in each, including the end token if the response has one."""
    unit_size: int = 1
    """Neighbouring rows that a loss compares, such as a pair. They stay in one minibatch, on one rank and in one
    forward pass."""
    prompt_segments: Repeated | None = None
    """B rows of int32: the number of each prompt token's segment, from 0 on. None if each response is one segment."""
    response_segments: Repeated | None = None
    """B rows of int32: the same for response tokens."""
    images: Packed | None = None
    """B rows of uint8: the images of each prompt (``images.images_of``). None for a data set without images."""
    routing: Packed | None = None
    """B rows of records: the experts that an engine used for each token (``routing.from_records``), those of a
    segment after those of the one before. None unless a trained model replays them."""

    def as_sequences(self) -> "Sequences":
        """Return the rows without the fields that a subclass adds."""
        return Sequences(**{field.name: getattr(self, field.name) for field in fields(Sequences)})

    def own_tokens(self) -> Repeated:
        """Return which response tokens the model generated, B rows of bool. Only these are trained on; here all."""
        return Repeated(np.ones(len(self), np.bool_), self.response_ids.lengths)

    @property
    def own_lengths(self) -> NDArray[np.int64]:
        """Return how many tokens of each response the model generated, [B]."""
        return self.own_tokens().sums


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples(Sequences):
    """Prompts with the response that the model should learn to give."""

    trained: Repeated | None = None
    """B rows of bool: the tokens that it learns, where others stand between them. None for all."""

    def own_tokens(self) -> Repeated:
        return super().own_tokens() if self.trained is None else self.trained


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs(Sequences):
    """Prompts with two neighbouring responses each: the chosen one is sample 0, the rejected one sample 1."""

    unit_size: int = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts(Sequences):
    """Prompts with responses that a model generated."""

    logprobs: Packed
    """B rows of float32: the logprob of each response token, from the engine that sampled it, at its temperature."""
    versions: Repeated
    """B rows of int32: the policy version that generated each response token, mostly one for a whole row."""
    finished: NDArray[np.bool_]
    """[B]: False where the response was cut at the token limit."""
    temperature: float
    """The divisor of the logits. Scoring and training on these rollouts use the same."""
    texts: Sequence[str]
    """B responses as text, without special tokens."""
    rows: Sequence[Mapping[str, Any]]
    """B rows of the data set."""

    @property
    def turn_lengths(self) -> Packed:
        """Return how many tokens the model generated in each turn, B rows of int64. Here a response is one turn."""
        return Packed(self.own_lengths, np.arange(len(self) + 1))

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Return which rollouts failed and are excluded from training, [B]; none unless a subclass says otherwise."""
        return np.zeros(len(self), np.bool_)

    def metrics(self) -> Mapping[str, float]:
        """Return the lengths of the responses, and the share of responses that finished."""
        lengths = self.own_lengths
        return {
            "length_mean": float(np.mean(lengths)),
            **{f"length_p{quantile}": float(np.percentile(lengths, quantile)) for quantile in QUANTILES},
            "length_max": int(np.max(lengths)),
            "finished": float(np.mean(self.finished)),
            **({"without_tokens": float(np.mean(lengths == 0))} if (lengths == 0).any() else {}),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Minibatch(Sequences):
    """The sequences of one optimizer step, with their weights in the loss."""

    step: int
    """The training step of the role, which determines the learning rate. It counts from 0 where the role's training
    begins, and is negative before."""
    columns: Mapping[str, Packed]
    """Inputs of the loss besides the model's logprobs: B rows of float32 each, one value for each response token."""
    weights: Packed
    """B rows of float32: the weight of each response token in the loss. Weights are computed from the whole minibatch,
    so that the gradient does not depend on micro-batches or ranks. Tokens with weight 0 are not part of the loss."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards(Batch):
    """A reward for each rollout."""

    values: NDArray[np.float32]
    """[B]: NaN where there is none; such a rollout is excluded from training."""
    turns: Packed | None = None
    """B rows of float32: the rewards of single turns, which add up to ``values``. None where they come at the end."""

    def less(self, penalties: NDArray[np.floating[Any]]) -> "Rewards":
        """Subtract ``penalties`` [B], which come with the last turn."""
        values, turns = (self.values - penalties).astype(np.float32), self.turns
        if turns is not None:
            with_turns, by_turn = turns.lengths > 0, turns.values.copy()
            by_turn[turns.offsets[1:][with_turns] - 1] -= penalties[with_turns]
            turns = turns.like(by_turn)
        return Rewards(values=values, turns=turns)

    def mean(self) -> float:
        """Return the mean over the samples that have a reward. Raise EngineError without any, or with infinite ones."""
        if np.isnan(self.values).all():
            why = next(iter(self.failures()), "their inputs have none, or no function returned one")
            raise EngineError(f"rewards: none of {len(self)} responses has one: {why}.")
        if infinite := int(np.isinf(self.values).sum()):
            raise NotFiniteError(f"rewards: {infinite} of {len(self)} are infinite.")
        return known_mean(self.values)

    def metrics(self) -> Mapping[str, float]:
        """Return the mean and the standard deviation of the rewards that are known."""
        return {"mean": self.mean(), "std": float(np.nanstd(self.values, dtype=np.float64))}


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergences(Batch):
    """The KL divergence of each response from a reference."""

    values: NDArray[np.float32]
    """[B], in nats, summed over each response."""

    def metrics(self) -> Mapping[str, float]:
        """Return the mean divergence."""
        return {"mean": known_mean(self.values)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection(Batch):
    """The prompts whose rollouts are trained on."""

    chosen: NDArray[np.bool_]
    """[P], in the order of keys."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Logprobs(Batch):
    """A model's logprobs of response tokens."""

    values: Packed
    """B rows of float32, one value for each response token."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueEstimates(Batch):
    """A critic's estimates of the return."""

    values: Packed
    """B rows of float32: the return expected before each response token is generated."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Advantages(Batch):
    """Advantages: by how much each response token is better than expected."""

    values: Packed
    """B rows of float32, one value for each response token."""

    @property
    def is_included(self) -> NDArray[np.bool_]:
        """Return which rollouts are trained on, [B]; the others are excluded."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutAdvantages(Advantages):
    """Advantages that are equal for all tokens of a rollout; NaN for excluded rollouts."""

    values: Repeated

    @property
    def is_included(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values.run_values)

    def metrics(self) -> Mapping[str, float]:
        """Return the share of trained rollouts that bring no gradient, as where all rewards of a prompt are equal."""
        known = self.values.run_values[self.is_included]
        return {"zero": float(np.mean(np.abs(known) < _ZERO))} if len(known) else {}


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenAdvantages(Advantages):
    """Advantages that differ between the tokens of a rollout."""

    excluded: NDArray[np.bool_]
    """[B]: rollouts that are not trained on."""

    @property
    def is_included(self) -> NDArray[np.bool_]:
        return ~self.excluded


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The output of a node that trains: numbers to report."""

    values: Mapping[str, float]

    def metrics(self) -> Mapping[str, float]:
        """Return all values."""
        return self.values


def known_mean(values: NDArray[np.float32]) -> float:
    """Return the mean of the values that are not NaN; at least one is not."""
    return float(np.nanmean(values, dtype=np.float64))


def count_reasons(reasons: NDArray[np.str_]) -> Mapping[str, int]:
    """Return how often each reason occurs, the most frequent first. Empty ones do not count."""
    return dict(Counter(reason for reason in reasons.tolist() if reason).most_common())


def describe_samples(keys: NDArray[np.int64]) -> str:
    """List the first few samples with these keys, [B, 3], for a message."""
    listed = [f"step {step} prompt {prompt} sample {sample}" for step, prompt, sample in keys[:_MAX_LISTED].tolist()]
    return ", ".join(listed) + (f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else "")
