"""From rewards to advantages."""

from dataclasses import dataclass

import numpy as np

from rlflow.batch import Advantages, Rewards, Rollouts
from rlflow.nodes.base import Node

# Keeps a group whose rewards are all alike from dividing by zero; GRPO's usual value.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Node, kind="group_advantage", unit="group"):
    """Reward minus its group's mean, over the group's standard deviation. Excluded rollouts do not count in either.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; without the division Dr. GRPO (arXiv 2503.20783).
    """

    normalize: bool = True
    """Divide by the group's standard deviation (of the sample, n - 1)."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Advantages:
        _, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
        values = rewards.values.astype(np.float64)
        known = np.isfinite(values)
        sizes = np.bincount(group, known)
        centred = values - (np.bincount(group, np.where(known, values, 0)) / np.maximum(sizes, 1))[group]
        if self.normalize:
            variance = np.bincount(group, np.where(known, centred, 0) ** 2) / np.maximum(sizes - 1, 1)
            centred = centred / (np.sqrt(variance) + _EPSILON)[group]
        return Advantages(values=centred.astype(np.float32))
