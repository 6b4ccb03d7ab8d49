"""What travels on the edges of the graph.

Ragged data is packed, never padded: one array a field, with offsets. Every row has a key (step, prompt, sample)
that it keeps for life; results stand in the order of keys, never of arrival.

Shapes: P prompts, G group, B rollouts (P x G), T tokens (of all rows together).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.packed import Packed, Records, Repeated
from rlflow.rows import Batch

__all__ = [
    "Advantages",
    "Batch",
    "Conversations",
    "Divergences",
    "Examples",
    "GaeAdvantages",
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
    "Selection",
    "Sequences",
    "SummedRewards",
    "TokenAdvantages",
    "ValueEstimates",
    "named_samples",
]

# Samples that a message names.
_NAMED = 3


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

    def own_tokens(self) -> Repeated:
        """B rows of bool: which response tokens are the model's own; no other is trained on. Here all of them are."""
        return Repeated(np.ones(len(self), np.bool_), self.response_ids.lengths)

    @property
    def own_lengths(self) -> NDArray[np.int64]:
        """[B]: how many of each response's tokens are the model's own."""
        return self.own_tokens().sums


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

    @property
    def failed(self) -> NDArray[np.bool_]:
        """[B]: of what was written there nothing can be said, and it is excluded. Here that is none."""
        return np.zeros(len(self), np.bool_)


@dataclass(frozen=True, eq=False, kw_only=True)
class Conversations(Rollouts):
    """Responses that a model and an environment wrote in turn. The environment's tokens have the logprob 0.

    ``finished`` where the environment said so; ``texts`` are the model's last turns alone; ``rows`` hold what the
    environment gave, over all turns, as ``environment_reward``.
    """

    own: Repeated
    """B rows of bool: whether the model wrote the token."""
    turns: NDArray[np.int64]
    """[B]: of the model."""
    reasons: NDArray[np.str_]
    """[B], why the environment failed; empty where it did not."""

    @property
    def failed(self) -> NDArray[np.bool_]:
        return np.asarray(self.reasons != "")

    def own_tokens(self) -> Repeated:
        return self.own


@dataclass(frozen=True, eq=False, kw_only=True)
class Minibatch(Sequences):
    """What one optimizer step trains on."""

    step: int
    """Of those in which its role is trained, counted from 0, and negative before them: the learning rate follows from
    it."""
    columns: Mapping[str, Packed]
    """What the loss reads besides the model's own logprobs: B rows of float32 each, a value a response token."""
    weights: Packed
    """B rows of float32: what each response token counts in the loss. They are made of the whole minibatch, so that
    the gradient does not depend on how it is cut. The loss does not see a token of weight 0."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewards(Batch):
    values: NDArray[np.float32]
    """[B], NaN where there is none: such a rollout is excluded, as if it had not been written."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection(Batch):
    chosen: NDArray[np.bool_]
    """[P], in the order of keys: the prompts that are trained on."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class GaeAdvantages(TokenAdvantages):
    """With what a critic is to learn, and how good it was."""

    returns: Packed
    """B rows of float32, a value a response token: what a critic should have expected before it. NaN where excluded."""
    explained_variance: float
    """Of the returns of all tokens, by the critic's values: 1 - Var(return - value) / Var(return)."""
    kl: float
    """Nats a response in the mean, from the reference; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    values: Mapping[str, float]


def named_samples(keys: NDArray[np.int64]) -> str:
    """Return the first few of these samples, from their keys [B, 3], for a message."""
    named = [f"step {step} prompt {prompt} sample {sample}" for step, prompt, sample in keys[:_NAMED].tolist()]
    return ", ".join(named) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
