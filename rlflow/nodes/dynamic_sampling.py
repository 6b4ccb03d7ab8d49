"""Dynamic sampling: prompts whose responses all earn the same reward are replaced by other prompts.

Shapes: P prompts.
"""

from dataclasses import dataclass

import numpy as np

from rlflow.batch import Rewards, Rollouts, Selection
from rlflow.nodes.base import Node
from rlflow.schema import Count


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(Node, kind="dynamic_sampling", unit="group"):
    """Select the prompts whose responses earn different rewards.

    A step trains on ``data.batch_size`` such prompts. Until there are enough, the nodes that this one depends on run in
    rounds, on the data's next prompts; all other nodes see the selected prompts alone. Rollouts without a reward do not
    count. Source: DAPO (arXiv 2503.14476), section 3.2 and algorithm 1.
    """

    max_rounds: Count = 10
    """The limit of rounds; after it a step trains on the prompts selected so far."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Selection:
        prompts, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
        lowest, highest = np.full(len(prompts), np.inf), np.full(len(prompts), -np.inf)
        known = np.flatnonzero(~np.isnan(rewards.values))
        np.minimum.at(lowest, group[known], rewards.values[known])
        np.maximum.at(highest, group[known], rewards.values[known])
        return Selection(chosen=lowest < highest)
