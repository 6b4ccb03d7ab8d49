"""Reward models: training one on pairs, and rewards from one.

Shapes: P pairs, T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Metrics, Pairs, Rewards, Rollouts
from rlflow.engines.base import Evaluates, TrainsReward
from rlflow.errors import EngineError
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.minibatches import Weighting, mean_metrics, train
from rlflow.nodes.preference import Preference, margins, preference_loss

if TYPE_CHECKING:
    from torch import Tensor


_LAST = {"r": "the output of the reward model's head at the last token"}


@dataclass(frozen=True, kw_only=True)
class RankingLoss:
    """-log sigmoid(r_chosen - r_rejected), r being the output of the reward head at a response's last token.

    Each token has the loss of its pair. Column: ``rows``. Source: InstructGPT (arXiv 2203.02155), equation 1.
    """

    temperature: float = 1.0

    def __call__(self, rewards: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token's pair [T], and metrics."""
        rows = columns["rows"]
        is_last = rows.diff(append=rows[-1:] + 1) != 0
        return preference_loss(margins(rewards * is_last, rows))


@dataclass(frozen=True, kw_only=True)
class RewardModelUpdate(Preference, Node, kind="reward_model_update", unit="batch"):
    """Train a reward model. Every pair has the same weight.

    The metric ``margin`` is the difference of the rewards, and ``accuracy`` the share of pairs in which it is above 0.
    """

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        term = "-log sigmoid(r of the chosen response - r of the rejected one)"
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where=_LAST)

    def run(self, engine: TrainsReward, pairs: Pairs) -> Metrics:
        weighting = Weighting(aggregation="sequence")
        steps = train(engine, pairs, {}, RankingLoss(), num_minibatches=self.num_minibatches, weighting=weighting)
        return Metrics(values=mean_metrics(steps))

    def scores(self, engine: Evaluates, pairs: Pairs) -> NDArray[np.float32]:  # type: ignore[override]
        return engine.evaluate(pairs).values


@dataclass(frozen=True, kw_only=True)
class RewardModel(Node, kind="reward_model", unit="sample"):
    """The reward of each response by the role's model, at the last token; none for a failed conversation."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="r", expression=_LAST["r"])

    def run(self, engine: Evaluates, rollouts: Rollouts) -> Rewards:
        rewards = engine.evaluate(rollouts)
        if not np.isfinite(rewards.values).all():
            count = int(np.sum(~np.isfinite(rewards.values)))
            raise EngineError(f"the reward model gives no finite number for {count} of {len(rollouts)} responses.")
        return Rewards(values=np.where(rollouts.failed, np.float32(np.nan), rewards.values))
