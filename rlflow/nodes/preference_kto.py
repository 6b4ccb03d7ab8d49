"""KTO: training on responses that are desirable or not, each by itself.

Shapes: P pairs, T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from rlflow.batch import Divergences, Logprobs, Metrics, Pairs
from rlflow.engines.base import Entropy, Scores, TrainsLogprobs
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.expressions import times
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.policy_loss import sums_over_responses
from rlflow.nodes.preference import Preference, difference_sums

if TYPE_CHECKING:
    from torch import Tensor

_Weight = Annotated[float, Ge(0), Le(1000)]


@dataclass(frozen=True, kw_only=True)
class MismatchedResponses(Node, kind="mismatched_responses", unit="batch", reads_tokens=True):
    """Each prompt with the responses to the prompt after it, whose divergence is KTO's reference point."""

    def run(self, pairs: Pairs) -> Pairs:
        return replace(pairs, response_ids=pairs.response_ids.take((np.arange(len(pairs)) + 2) % len(pairs)))


@dataclass(frozen=True, kw_only=True)
class KtoLoss:
    """desirable (1 - sigmoid(beta (d - z))) of chosen, undesirable (1 - sigmoid(beta (z - d))) of rejected responses.

    d = log(policy / reference) of the response. Columns: ``reference`` and ``rows``. Source: arXiv 2402.01306, equation
    8.
    """

    beta: float
    point: float
    """z, the divergence of responses to other prompts, which is not negative."""
    desirable: float
    undesirable: float
    temperature: float = 1.0
    entropy: Entropy = "unused"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token's response [T], and metrics."""
        rows = columns["rows"]
        gain = (
            self.beta * (sums_over_responses(logprobs - columns["reference"], rows) - self.point) * (1 - 2 * (rows % 2))
        )
        weight = self.desirable + (self.undesirable - self.desirable) * (rows % 2)
        return weight * (-gain).sigmoid(), {"accuracy": (1 + gain.sign()) / 2}


@dataclass(frozen=True, kw_only=True)
class KtoUpdate(Preference, Node, kind="kto_update", unit="batch"):
    """Kahneman-Tversky optimization. Every response has the same weight, times that of its side.

    The metric ``accuracy`` is the share of responses on the right side of the reference point.
    """

    other_responses: ClassVar[frozenset[str]] = frozenset({"kl"})

    beta: Annotated[float, Ge(1e-6), Le(100)] = 0.1
    """The weight of staying near the reference."""
    desirable: _Weight = 1.0
    """The weight of chosen responses."""
    undesirable: _Weight = 1.0
    """The weight of rejected responses."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        terms = (
            times(self.desirable, f"sigmoid({self.beta:g} (z - d)) of chosen responses"),
            times(self.undesirable, f"sigmoid({self.beta:g} (d - z)) of rejected ones"),
        )
        where = {
            "d": "sum over the response of log(p / p_ref)",
            "z": f"max(0, mean of {symbols['kl']})",
            "p_ref": f"p by {symbols['reference']}",
        }
        return Formula(symbol="L", expression=f"mean over a minibatch's responses of [{', '.join(terms)}]", where=where)

    def run(self, engine: TrainsLogprobs, pairs: Pairs, reference: Logprobs, kl: Divergences) -> Metrics:
        point = max(float(np.mean(kl.values, dtype=np.float64)), 0.0)
        loss = KtoLoss(beta=self.beta, point=point, desirable=self.desirable, undesirable=self.undesirable)
        steps = train(
            engine,
            pairs,
            {"reference": reference.values},
            loss,
            OptimizerSteps(num_minibatches=self.num_minibatches, weighting=Weighting(aggregation="sequence")),
        )
        return Metrics(values=mean_metrics(steps) | {"point": point})

    def scores(self, engine: Scores, pairs: Pairs, reference: Logprobs, kl: Divergences) -> NDArray[np.float32]:  # type: ignore[override]
        """Return log(policy / reference) of each response."""
        return difference_sums(engine.logprobs(pairs, 1.0), reference)
