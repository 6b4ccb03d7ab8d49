"""What a model says of responses that are already there."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from rlflow.batch import Logprobs, Rollouts
from rlflow.engines.base import Scores
from rlflow.nodes.base import Node


@dataclass(frozen=True, kw_only=True)
class ScoreLogprobs(Node, kind="logprobs", unit="sample"):
    """The log-probability of every response token under the role's model."""

    temperature: Annotated[float, Gt(0)] = 1.0
    """That of the node that generated."""

    def run(self, engine: Scores, rollouts: Rollouts) -> Logprobs:
        return engine.logprobs(rollouts, self.temperature)
