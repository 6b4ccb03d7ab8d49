"""Training on pairs of a chosen and a rejected response: direct preference optimization, and reward models.

Shapes: P pairs, T response tokens of a micro-batch, which has both responses of each of its pairs next to each other.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Le, Lt
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Metrics, Pairs
from rlflow.engines.base import Entropy, Evaluates, Scores, TokenLoss, TrainsLogprobs, TrainsReward
from rlflow.errors import RecipeError
from rlflow.nodes.base import Formula, Headline, Node
from rlflow.nodes.expressions import times
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.policy_loss import sums_over_responses
from rlflow.nodes.scoring import REWARD_OUTPUT
from rlflow.schema import Coefficient, Count, Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Preference(Section):
    """The base of updates on pairs. A kind of node derives from this and from Node."""

    headline: ClassVar[Headline | None] = Headline("accuracy", ".3f", label="accuracy", is_learned=True)

    num_minibatches: Count = 1
    """The number of optimizer steps that the pairs are divided among."""

    @abstractmethod
    def scores(self, engine: Any, pairs: Pairs, **inputs: Any) -> NDArray[np.float32]:
        """Return a score for each response [2 P]; preferred ones have larger scores. The parameters are ``run``'s."""

    def accuracy(self, engine: Any, pairs: Pairs, **inputs: Any) -> float:
        """Return the share of pairs whose chosen response has the larger score. A tie counts half."""
        scores = self.scores(engine, pairs, **inputs)
        return float(np.mean((1 + np.sign(scores[0::2] - scores[1::2])) / 2))


def margins(values: "Tensor", rows: "Tensor") -> "Tensor":
    """Return for each token [T] the sum of ``values`` [T] over its pair's chosen response minus the rejected one's.

    ``rows`` [T] are the numbers of responses in the micro-batch: even ones are chosen.
    """
    return sums_over_responses(values * (1 - 2 * (rows % 2)), rows // 2)


def means(values: "Tensor", rows: "Tensor") -> "Tensor":
    """Return ``values`` [T] over the number of tokens of their response, so that sums over responses are means."""
    return values / sums_over_responses(values.detach().new_ones(len(values)), rows)


def chosen_nll(logprobs: "Tensor", rows: "Tensor") -> "Tensor":
    """Return for each token [T] the mean of -log p over the tokens of its pair's chosen response."""
    return -sums_over_responses(means(logprobs, rows) * (1 - rows % 2), rows // 2)


def preference_loss(margin: "Tensor", label_smoothing: float = 0.0) -> "tuple[Tensor, Mapping[str, Tensor]]":
    """Return -log sigmoid(margin) [T] from the margins [T] of each token's pair, and metrics.

    With ``label_smoothing`` e it is -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).
    Source: Bradley and Terry 1952, as in InstructGPT (arXiv 2203.02155), equation 1.
    """
    # -log sigmoid(m) = log(1 + exp(-m)), and -log sigmoid(-m) is larger by m.
    loss = (-margin).logaddexp(margin.new_zeros(())) + label_smoothing * margin
    return loss, {"accuracy": (1 + margin.sign()) / 2, "margin": margin}


def difference_sums(policy: Logprobs, reference: Logprobs) -> NDArray[np.float32]:
    """Return log(policy / reference) of each response [2 P]."""
    differences = policy.values.values.astype(np.float64) - reference.values.values
    return np.add.reduceat(differences, policy.values.offsets[:-1]).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class DpoLoss:
    """-log sigmoid(beta m), m = d_chosen - d_rejected, d = log(policy / reference) of a whole response.

    Each token has the loss of its pair. Columns: ``reference`` and ``rows``. Source: arXiv 2305.18290, equation 7. With
    ``shape: ipo`` it is (m - 1 / (2 beta))^2: arXiv 2310.12036, equation 17.
    """

    beta: float
    label_smoothing: float = 0.0
    shape: Literal["sigmoid", "ipo"] = "sigmoid"
    mean_over_tokens: bool = False
    nll_coef: float = 0.0
    temperature: float = 1.0
    entropy: Entropy = "unused"

    @property
    def expression(self) -> str:
        """Return the loss as a formula for people; m is the margin before it is scaled."""
        if self.shape == "ipo":
            term = f"(m - {1 / (2 * self.beta):g})^2"
        else:
            sides = [(1 - self.label_smoothing, "m"), (self.label_smoothing, "(-m)")]
            terms = [times(share, f"log sigmoid({times(self.beta, side)})") for share, side in sides if share]
            term = f"-{' - '.join(terms)}"
        nll = times(self.nll_coef, "mean of log p over the chosen response")
        return f"{term} - {nll}" if self.nll_coef else term

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss of each token's pair [T], and metrics."""
        rows, difference = columns["rows"], logprobs - columns["reference"]
        margin = margins(means(difference, rows) if self.mean_over_tokens else difference, rows)
        loss, metrics = preference_loss(self.beta * margin, self.label_smoothing)
        if self.shape == "ipo":
            loss = (margin - 1 / (2 * self.beta)) ** 2
        if self.nll_coef:
            loss = loss + self.nll_coef * chosen_nll(logprobs, rows)
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class DpoUpdate(Preference, Node, kind="dpo_update", unit="batch"):
    """Direct preference optimization. Every pair has the same weight.

    The metric ``margin`` is the difference of the implicit rewards, beta log(policy / reference), and ``accuracy`` the
    share of pairs in which it is above 0.
    """

    hints_for_other_names: ClassVar[Mapping[str, str]] = {"rpo_alpha": "nll_coef", "loss_type": "shape: sigmoid or ipo"}

    beta: Annotated[float, Ge(1e-6), Le(100)] = 0.1
    """The weight of staying near the reference."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """The share of pairs whose labels are assumed to be wrong (https://ericmitchell.ai/cdpo.pdf)."""
    shape: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a margin m: -log sigmoid(beta m), or IPO's (m - 1 / (2 beta))^2, which does not grow without end."""
    mean_over_tokens: bool = False
    """Divide log(policy / reference) of a response by its number of tokens."""
    nll_coef: Coefficient = 0.0
    """The coefficient of the chosen response's mean -log p, which is added to the loss (arXiv 2404.19733)."""

    def check(self, connected: frozenset[str]) -> None:
        if self.shape == "ipo" and self.label_smoothing:
            raise RecipeError("label_smoothing", "has no effect with shape: ipo", fix="label_smoothing: 0")

    def loss(self) -> TokenLoss:
        """Return the loss of a pair's tokens. It reads the column ``reference``."""
        return DpoLoss(
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            shape=self.shape,
            mean_over_tokens=self.mean_over_tokens,
            nll_coef=self.nll_coef,
        )

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        where = {
            "m": "d of the chosen response - d of the rejected one",
            "d": f"{'mean' if self.mean_over_tokens else 'sum'} over the response of log(p / p_ref)",
            "p_ref": f"p by {symbols['reference']}",
        }
        loss = self.loss()
        term = getattr(loss, "expression", f"{type(loss).__name__}(m)")
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where=where)

    def run(self, engine: TrainsLogprobs, pairs: Pairs, reference: Logprobs) -> Metrics:
        steps = train(
            engine,
            pairs,
            {"reference": reference.values},
            self.loss(),
            # The tokens of a response weigh 1 / (2 P) together, and those of a pair, which share one loss, 1 / P.
            OptimizerSteps(num_minibatches=self.num_minibatches, weighting=Weighting(aggregation="sequence")),
        )
        return Metrics(values=mean_metrics(steps))

    def scores(self, engine: Scores, pairs: Pairs, reference: Logprobs) -> NDArray[np.float32]:  # type: ignore[override]
        """Return the implicit rewards over beta."""
        sums = difference_sums(engine.logprobs(pairs, 1.0), reference)
        return (sums / pairs.response_ids.lengths if self.mean_over_tokens else sums).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class RankingLoss:
    """-log sigmoid(r_chosen - r_rejected), r being the output of the reward head at a response's last token.

    Each token has the loss of its pair. Column: ``rows``. Source: InstructGPT (arXiv 2203.02155), equation 1.
    """

    temperature: float = 1.0
    entropy: Entropy = "unused"

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
        return Formula(symbol="L", expression=f"mean over a minibatch's pairs of [{term}]", where={"r": REWARD_OUTPUT})

    def run(self, engine: TrainsReward, pairs: Pairs) -> Metrics:
        weighting = Weighting(aggregation="sequence")
        steps = train(
            engine, pairs, {}, RankingLoss(), OptimizerSteps(num_minibatches=self.num_minibatches, weighting=weighting)
        )
        return Metrics(values=mean_metrics(steps))

    def scores(self, engine: Evaluates, pairs: Pairs) -> NDArray[np.float32]:  # type: ignore[override]
        return engine.evaluate(pairs).values
