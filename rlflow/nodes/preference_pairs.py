"""Pairs of a policy's own responses, for a reward model or for online DPO."""

from dataclasses import dataclass

import numpy as np

from rlflow.batch import Pairs, Rewards, Rollouts
from rlflow.errors import GraphError, NotFiniteError
from rlflow.nodes.advantages import groups_of
from rlflow.nodes.base import Node, NodeView
from rlflow.schema import Count


@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Node, kind="preference_pairs", unit="batch", compares_groups=True, reads_tokens=True):
    """Pairs of the best with the worst responses to each prompt, where their rewards differ.

    Nodes that train on pairs read them with ``pairs: NAME``. A step without any pair is skipped. Source: online DPO
    (arXiv 2402.04792).
    """

    per_group: Count = 1
    """The most pairs of a prompt: the best response with the worst, the second best with the second worst, and on."""

    def check_graph(self, view: NodeView) -> None:
        for generator in view.generators():
            if generator.operation.num_turns > 1:
                fact = f"graph.{generator.name} generates in several turns, and pairs have one response each"
                raise GraphError(view.path, fact, fix="a node 'generate'")

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Pairs:
        known = np.flatnonzero(~np.isnan(rewards.values))
        values, group = rewards.values, groups_of(rollouts)
        order = known[np.lexsort((values[known], group[known]))]
        starts = np.flatnonzero(np.diff(group[order])) + 1
        rows, samples = [], []
        for members in np.split(order, starts):
            for number in range(min(self.per_group, len(members) // 2)):
                worst, best = members[number], members[-1 - number]
                if values[worst] < values[best]:
                    rows += [best, worst]
                    samples += [2 * number, 2 * number + 1]
        if not rows:
            raise NotFiniteError("all responses to each prompt have the same reward, so there are no pairs.")
        chosen = rollouts.as_sequences().take(np.array(rows, np.int64))
        chosen.keys[:, 2] = samples
        return Pairs(**vars(chosen) | {"unit_size": 2})
