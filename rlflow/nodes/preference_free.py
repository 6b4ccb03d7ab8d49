"""Training on pairs without a reference model: SimPO and ORPO.

Shapes: P pairs, T response tokens of a micro-batch, which has both responses of each of its pairs next to each other.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from rlflow.batch import Metrics, Pairs
from rlflow.engines.base import Entropy, Scores, TokenLoss, TrainsLogprobs
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.expressions import times
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.policy_loss import means_over_responses
from rlflow.nodes.preference import Preference, chosen_nll, margins, means, preference_loss
from rlflow.schema import Coefficient

if TYPE_CHECKING:
    from torch import Tensor

_MEAN = "mean of log p over the response"
# Keeps log(1 - p) finite where a model is certain of every token.
_MOST_CERTAIN = -1e-6


@dataclass(frozen=True, kw_only=True)
class SimpoLoss:
    """-log sigmoid(beta m - margin), m the mean logprob of the chosen response minus that of the rejected one.

    Each token has the loss of its pair. Column: ``rows``. Source: arXiv 2405.14734, equation 6.
    """

    beta: float
    margin: float
    temperature: float = 1.0
    entropy: Entropy = "unused"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token's pair [T], and metrics."""
        margin = self.beta * margins(means(logprobs, columns["rows"]), columns["rows"])
        _, metrics = preference_loss(margin)
        return preference_loss(margin - self.margin)[0], metrics


@dataclass(frozen=True, kw_only=True)
class OrpoLoss:
    """NLL of the chosen response - ratio_coef log sigmoid(log odds of the chosen one - log odds of the rejected one).

    The odds are p / (1 - p), p the geometric mean of a response's probabilities. Each token has the loss of its pair.
    Column: ``rows``. Source: arXiv 2403.07691, equations 4 to 7.
    """

    ratio_coef: float
    temperature: float = 1.0
    entropy: Entropy = "unused"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token's pair [T], and metrics."""
        rows = columns["rows"]
        log_p = means_over_responses(logprobs, rows).clamp(max=_MOST_CERTAIN)
        loss, metrics = preference_loss(margins(means(log_p - (-log_p.exp()).log1p(), rows), rows))
        return chosen_nll(logprobs, rows) + self.ratio_coef * loss, metrics


@dataclass(frozen=True, kw_only=True)
class ReferenceFree(Preference):
    """The base of updates that compare the mean logprobs of both responses. Every pair has the same weight."""

    @abstractmethod
    def loss(self) -> TokenLoss:
        """Return the loss of a pair's tokens."""

    def run(self, engine: TrainsLogprobs, pairs: Pairs) -> Metrics:
        """Train on the pairs."""
        weighting = Weighting(aggregation="sequence")
        steps = train(
            engine, pairs, {}, self.loss(), OptimizerSteps(num_minibatches=self.num_minibatches, weighting=weighting)
        )
        return Metrics(values=mean_metrics(steps))

    def scores(self, engine: Scores, pairs: Pairs) -> NDArray[np.float32]:  # type: ignore[override]
        """Return the mean logprob of each response [2 P]."""
        policy = engine.logprobs(pairs, 1.0).values
        sums = np.add.reduceat(policy.values.astype(np.float64), policy.offsets[:-1])
        return (sums / policy.lengths).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class SimpoUpdate(ReferenceFree, Node, kind="simpo_update", unit="batch"):
    """SimPO: the mean logprob is the reward of a response, and the chosen one must be better by a margin.

    The metric ``margin`` is the difference of the rewards, ``beta`` times the mean logprobs.
    """

    beta: Annotated[float, Ge(1e-6), Le(100)] = 2.0
    """The factor of the mean logprobs."""
    margin: Annotated[float, Ge(0), Le(100)] = 1.0
    """The difference of the rewards at which the loss is log 2."""

    def loss(self) -> TokenLoss:
        return SimpoLoss(beta=self.beta, margin=self.margin)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {"m": "d of the chosen response - d of the rejected one", "d": _MEAN}
        term = f"-log sigmoid({times(self.beta, 'm')} - {self.margin:g})"
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where=where)


@dataclass(frozen=True, kw_only=True)
class OrpoUpdate(ReferenceFree, Node, kind="orpo_update", unit="batch"):
    """ORPO: supervised training on the chosen response, with a penalty on the odds of the rejected one.

    The metric ``margin`` is the difference of the log odds.
    """

    ratio_coef: Coefficient = 0.1
    """The coefficient of the odds ratio."""

    def loss(self) -> TokenLoss:
        return OrpoLoss(ratio_coef=self.ratio_coef)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {
            "m": "o of the chosen response - o of the rejected one",
            "o": "log(g / (1 - g)), g = exp(d)",
            "d": _MEAN,
        }
        term = f"-d of the chosen response - {times(self.ratio_coef, 'log sigmoid(m)')}"
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where=where)
