"""The data on the edges of a graph: batches of rows of different lengths, packed, with keys."""

from rlflow.batch.batch import (
    Advantages,
    Conversations,
    Examples,
    Logprobs,
    Metrics,
    Minibatch,
    Pairs,
    Prompts,
    Rewards,
    RolloutAdvantages,
    Rollouts,
    Selection,
    Sequences,
    TokenAdvantages,
    ValueEstimates,
    count_reasons,
    describe_samples,
    known_mean,
)
from rlflow.batch.packed import Packed, Records, Repeated
from rlflow.batch.rows import Batch

__all__ = [
    "Advantages",
    "Batch",
    "Conversations",
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
    "Selection",
    "Sequences",
    "TokenAdvantages",
    "ValueEstimates",
    "count_reasons",
    "describe_samples",
    "known_mean",
]
