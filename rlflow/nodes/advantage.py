"""From rewards to advantages. Rollouts without a reward count in none, and have none.

Shapes: B rollouts.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Repeated, Rewards, RolloutAdvantages, Rollouts, TokenAdvantages
from rlflow.nodes.base import Node
from rlflow.nodes.kl import Estimator, token_kl

# Keeps a group whose rewards are all alike from dividing by zero; GRPO's usual value.
_EPSILON = 1e-4
# Likewise of a batch, where it is the usual one of REINFORCE++.
_EPSILON_OF_BATCH = 1e-8


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Node, kind="group_advantage", unit="group"):
    """Reward minus its group's mean, over the group's standard deviation. Excluded rollouts do not count in either.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; without the division Dr. GRPO (arXiv 2503.20783).
    """

    normalize: bool = True
    """Divide by the group's standard deviation (of the sample, n - 1)."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        group, sizes = groups_of(rollouts, rewards)
        centred = centred_in_groups(rewards, group, sizes)
        if self.normalize:
            variance = np.bincount(group, np.nan_to_num(centred) ** 2) / np.maximum(sizes - 1, 1)
            centred = centred / (np.sqrt(variance) + _EPSILON)[group]
        return for_all_tokens(centred, rollouts)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutAdvantage(Node, kind="leave_one_out_advantage", unit="group"):
    """Reward minus the mean of the others in its group; nought where there are none.

    Source: RLOO (arXiv 2402.14740). It is n / (n - 1) times the reward minus the group's mean.
    """

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        group, sizes = groups_of(rollouts, rewards)
        others = np.maximum(sizes - 1, 1)
        return for_all_tokens(centred_in_groups(rewards, group, sizes) * (sizes / others)[group], rollouts)


@dataclass(frozen=True, kw_only=True)
class GreedyAdvantage(Node, kind="greedy_advantage", unit="group"):
    """Reward minus that of the likeliest response to the same prompt.

    Source: ReMax (arXiv 2310.10505). ``greedy`` are rollouts at temperature 0, in groups of one.
    """

    def run(self, rollouts: Rollouts, rewards: Rewards, greedy: Rollouts, greedy_rewards: Rewards) -> RolloutAdvantages:
        both = np.concatenate([greedy.keys[:, :2], rollouts.keys[:, :2]])
        _, prompt = np.unique(both, axis=0, return_inverse=True)
        baseline = np.empty(len(greedy))
        baseline[prompt[: len(greedy)]] = greedy_rewards.values
        return for_all_tokens(rewards.values - baseline[prompt[len(greedy) :]], rollouts)


@dataclass(frozen=True, kw_only=True)
class BatchAdvantage(Node, kind="batch_advantage", unit="batch"):
    """Reward minus its group's mean, normalised over all tokens of the batch.

    Source: REINFORCE++ with a baseline (arXiv 2501.03262).
    """

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        values = centred_in_groups(rewards, *groups_of(rollouts, rewards))
        weights = np.where(np.isnan(values), 0, rollouts.own_lengths)
        centred = values - np.average(np.nan_to_num(values), weights=weights)
        deviation = np.sqrt(np.average(np.nan_to_num(centred) ** 2, weights=weights))
        return for_all_tokens(centred / (deviation + _EPSILON_OF_BATCH), rollouts)


@dataclass(frozen=True, kw_only=True)
class TokenAdvantage(Node, kind="token_advantage", unit="batch", reads_tokens=True):
    """Reward minus ``kl_coef`` times the KL divergence of this token and those after it, normalised over all tokens of
    the batch.

    Source: REINFORCE++ (arXiv 2501.03262).
    """

    kl_coef: Annotated[float, Ge(0)] = 0.0
    kl_estimator: Estimator = "k1"

    def run(
        self, rollouts: Rollouts, rewards: Rewards, reference: Logprobs, old_logprobs: Logprobs | None = None
    ) -> TokenAdvantages:
        lengths = rollouts.response_ids.lengths
        kl = token_kl(self.kl_estimator, rollouts, reference, old_logprobs)
        before = np.concatenate([[0.0], np.cumsum(kl.values)])
        # Of each token and those after it in its row.
        ahead = np.repeat(before[kl.offsets[1:]], lengths) - before[:-1]
        values = np.repeat(rewards.values.astype(np.float64), lengths) - self.kl_coef * ahead
        excluded, own = np.isnan(rewards.values), rollouts.own_tokens().values
        return TokenAdvantages(values=Packed(normalised(values, own).astype(np.float32), kl.offsets), excluded=excluded)


def groups_of(rollouts: Rollouts, rewards: Rewards) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B]: the number of each rollout's group, and for each group how many of its rollouts have a reward."""
    _, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
    return group, np.bincount(group, ~np.isnan(rewards.values)).astype(np.int64)


def centred_in_groups(rewards: Rewards, group: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """[B]: each reward minus the mean of its group."""
    values = rewards.values.astype(np.float64)
    return values - (np.bincount(group, np.nan_to_num(values)) / np.maximum(sizes, 1))[group]


def normalised(values: NDArray[np.float64], own: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[T]: by those of a batch's tokens that are there and the model's own."""
    counting = values[own]
    centred: NDArray[np.float64] = (values - np.nanmean(counting)) / (np.nanstd(counting) + _EPSILON_OF_BATCH)
    return centred


def for_all_tokens(values: NDArray[np.float64], rollouts: Rollouts) -> RolloutAdvantages:
    """Of advantages [B]."""
    return RolloutAdvantages(values=Repeated(values.astype(np.float32), rollouts.response_ids.lengths))
