"""Prompts that teach nothing, and others in their place."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from rlflow.batch import Rewards, Rollouts, Selection
from rlflow.nodes.base import Node


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Node, kind="dynamic_sampling", unit="group"):
    """A step trains on ``data.batch_size`` prompts whose responses are not all rewarded alike: until there are so many,
    what this node is made of is made in rounds, of the data's next prompts. Other nodes see these prompts alone.

    Rollouts without a reward do not count. Source: DAPO (arXiv 2503.14476), section 3.2 and algorithm 1.
    """

    max_rounds: Annotated[int, Ge(1)] = 10
    """After these a step trains on what there is."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Selection:
        prompts, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
        least, most = np.full(len(prompts), np.inf), np.full(len(prompts), -np.inf)
        known = np.flatnonzero(~np.isnan(rewards.values))
        np.minimum.at(least, group[known], rewards.values[known])
        np.maximum.at(most, group[known], rewards.values[known])
        return Selection(chosen=least < most)
