"""What a model says of responses that are already there."""

from dataclasses import dataclass

import numpy as np

from rlflow.batch import Divergences, Logprobs, Rollouts
from rlflow.engines.base import Scores
from rlflow.nodes.base import Node
from rlflow.nodes.kl import Estimator, token_kl


@dataclass(frozen=True, kw_only=True)
class ScoreLogprobs(Node, kind="logprobs", unit="sample"):
    """The log-probability of every response token under the role's model, at the temperature of the rollouts."""

    def run(self, engine: Scores, rollouts: Rollouts) -> Logprobs:
        return engine.logprobs(rollouts, rollouts.temperature)


@dataclass(frozen=True, kw_only=True)
class KlDivergence(Node, kind="kl_divergence", unit="sample"):
    """From the reference, summed over each response; the policy is ``old_logprobs`` where such a node is there, else
    what the engine sampled with."""

    kl_estimator: Estimator = "k1"

    def run(self, rollouts: Rollouts, reference: Logprobs, old_logprobs: Logprobs | None = None) -> Divergences:
        kl = token_kl(self.kl_estimator, rollouts, reference, old_logprobs)
        return Divergences(values=np.add.reduceat(kl.values, kl.offsets[:-1]).astype(np.float32))
