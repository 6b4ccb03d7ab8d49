"""Training a role's model on the step's data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from rlflow.batch import Advantages, Examples, Logprobs, Metrics, Minibatch, Packed, Repeated, Rollouts, Sequences
from rlflow.engines.base import TokenLoss, Trains
from rlflow.errors import GraphError
from rlflow.nodes.base import Node
from rlflow.nodes.losses import ClippedPolicyLoss, LikelihoodLoss


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Node, kind="policy_update", unit="batch"):
    """Policy gradient with a clipped ratio, every token counting the same within its minibatch. Excluded rollouts are
    in none.

    The ratio is taken to ``old_logprobs`` where such a node is there, else to those that the engine sampled with.
    How far the two engines are apart is the metric ``sampler_difference`` (for the same weights, or with ``overcommit``
    for those of the steps that wrote the rollouts): the absolute difference of their logprobs, in the mean over the
    tokens of the first minibatch, before it changes the model. With ``old_logprobs`` it is the mean over each
    minibatch's tokens, and that of all optimizer steps.
    """

    clip_eps: Annotated[float, Gt(0)] = 0.2
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Needs a ``reference``."""
    num_minibatches: Annotated[int, Ge(1)] = 1
    """Optimizer steps that the rollouts are divided among."""
    num_epochs: Annotated[int, Ge(1)] = 1

    def check(self, connected: frozenset[str]) -> None:
        if self.kl_coef > 0 and "reference" not in connected:
            raise GraphError(
                "kl_coef",
                f"{self.kl_coef} asks for the reference's logprobs, and no node 'reference' gives them",
                fix="add reference: {node: logprobs, role: reference}, or kl_coef: 0",
            )

    def run(
        self,
        engine: Trains,
        rollouts: Rollouts,
        advantages: Advantages,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
    ) -> Metrics:
        if not (known := np.isfinite(advantages.values)).all():
            kept = np.flatnonzero(known)
            rollouts, advantages = rollouts.take(kept), advantages.take(kept)
            reference = None if reference is None else reference.take(kept)
            old_logprobs = None if old_logprobs is None else old_logprobs.take(kept)
        columns = {
            "old_logprobs": rollouts.logprobs,
            "advantages": Repeated(advantages.values, rollouts.response_ids.lengths),
        }
        if old_logprobs is not None:
            columns |= {"old_logprobs": old_logprobs.values, "sampler_logprobs": rollouts.logprobs}
        if reference is not None:
            columns["reference"] = reference.values
        loss = ClippedPolicyLoss(clip_eps=self.clip_eps, kl_coef=self.kl_coef, temperature=rollouts.temperature)
        steps = train(engine, rollouts, columns, loss, self.num_minibatches, self.num_epochs)
        metrics = averaged(steps)
        if old_logprobs is None:
            # Before its first step the trained model is the one that wrote the rollouts, or the last of them.
            metrics["sampler_difference"] = steps[0]["logprob_change"]
        return Metrics(values=metrics)


@dataclass(frozen=True, kw_only=True)
class SftUpdate(Node, kind="sft_update", unit="batch"):
    """Supervised training on the responses of the data set."""

    num_minibatches: Annotated[int, Ge(1)] = 1

    def run(self, engine: Trains, examples: Examples) -> Metrics:
        return Metrics(
            values=averaged(train(engine, examples, {}, LikelihoodLoss(), self.num_minibatches, num_epochs=1))
        )


def train(
    engine: Trains,
    sequences: Sequences,
    columns: dict[str, Packed],
    loss: TokenLoss,
    num_minibatches: int,
    num_epochs: int,
) -> list[Mapping[str, float]]:
    """One optimizer step a minibatch, and the metrics of each. Fewer rows than minibatches make fewer minibatches.

    A minibatch is cut in the order of the prompts' numbers within their steps: the data's own order is random already,
    and what was begun in earlier steps is spread over all minibatches.
    """
    steps, bare = [], sequences.bare()
    begun_in, prompt, sample = sequences.keys.T
    order = np.lexsort((sample, begun_in, prompt))
    for rows in num_epochs * np.array_split(order, min(num_minibatches, len(sequences))):
        part = bare.take(rows)
        lengths = part.response_ids.lengths
        weights = Repeated(np.full(len(part), 1 / lengths.sum(), np.float32), lengths)
        taken = {name: column.take(rows) for name, column in columns.items()}
        # Some of every step's samples were begun in it.
        minibatch = Minibatch(**vars(part), step=int(begun_in.max()), columns=taken, weights=weights)
        steps.append(engine.update(minibatch, loss).values)
    return steps


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps."""
    return {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
