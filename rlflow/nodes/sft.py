"""Supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.batch import Examples, Metrics
from rlflow.engines.base import Trains
from rlflow.nodes.base import Formula, Headline, Node
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.schema import Count


@dataclass(frozen=True, kw_only=True)
class SftUpdate(Node, kind="sft_update", unit="batch"):
    """Supervised training on the responses of the data set."""

    headline = Headline("loss", ".4f", label="loss", is_learned=True)

    num_minibatches: Count = 1
    """The number of optimizer steps that the examples are divided among."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="L", expression=f"{Weighting().expression('responses')} of [-log p]")

    def run(self, engine: Trains, examples: Examples) -> Metrics:
        steps = train(engine, examples, {}, LikelihoodLoss(), OptimizerSteps(num_minibatches=self.num_minibatches))
        return Metrics(values=mean_metrics(steps))
