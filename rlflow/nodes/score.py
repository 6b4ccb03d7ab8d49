"""What a model says of responses that are already there."""

from dataclasses import dataclass

from rlflow.batch import Logprobs, Rollouts, Sequences
from rlflow.engines.base import Scores
from rlflow.nodes.base import Node


@dataclass(frozen=True, kw_only=True)
class ScoreLogprobs(Node, kind="logprobs", unit="sample"):
    """The log-probability of every response token under the role's model, at the temperature of the rollouts; at 1 for
    responses of the data, as with ``rollouts: pairs``."""

    def run(self, engine: Scores, rollouts: Sequences) -> Logprobs:
        temperature = rollouts.temperature if isinstance(rollouts, Rollouts) else 1.0
        return engine.logprobs(rollouts, temperature)
