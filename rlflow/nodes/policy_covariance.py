"""Updates of a policy that spare the tokens which lower its entropy most: Clip-Cov and KL-Cov.

A token's covariance is the product of its advantage and its logprob, each minus its mean over the step's tokens.

Source: arXiv 2505.22617, section 4. There the covariances of a minibatch change with each optimizer step; here they are
those of the step's old logprobs, so that they do not depend on micro-batches and ranks.

Shapes: N tokens of a step, T response tokens of a micro-batch.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from rlflow.batch import Advantages, Logprobs, Metrics, Packed, Rollouts
from rlflow.engines.base import Trains
from rlflow.errors import RecipeError
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.expressions import times
from rlflow.nodes.kl import KlCoefficient, ratio
from rlflow.nodes.policy_loss import CLIPPING, check_clipping, clipped_expression, clipped_surrogate
from rlflow.nodes.policy_update import PolicyGradient
from rlflow.schema import ClipDistance, ClipShare, Coefficient

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.nodes.policy_loss import Columns, Loss


@dataclass(frozen=True, kw_only=True)
class CovarianceUpdate(PolicyGradient):
    """The base of updates that treat some tokens in another way, chosen by their covariances."""

    share: Annotated[float, Gt(0), Lt(1)] = 2e-4
    """The share of the step's tokens that are chosen, at least one."""

    @abstractmethod
    def choose(self, covariances: NDArray[np.float64], count: int, step: int) -> NDArray[np.int64]:
        """Return the numbers of at most ``count`` tokens from the covariances [N] of all tokens."""

    def run(
        self,
        engine: Trains,
        rollouts: Rollouts,
        advantages: Advantages,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
        state: KlCoefficient | None = None,
        *,
        columns: Mapping[str, Packed] = MappingProxyType({}),
    ) -> Metrics:
        """Train on the rollouts that have an advantage."""
        old = rollouts.logprobs if old_logprobs is None else old_logprobs.values
        values = advantages.values.values.astype(np.float64)
        tokens = np.flatnonzero(rollouts.own_tokens().values & np.isfinite(values))
        chosen = np.zeros(len(values), np.float32)
        if len(tokens):
            centred = [column[tokens] - column[tokens].mean() for column in (values, old.values.astype(np.float64))]
            count = max(1, int(self.share * len(tokens)))
            chosen[tokens[self.choose(centred[0] * centred[1], count, int(rollouts.keys[:, 0].max()))]] = 1.0
        columns = {**columns, "chosen": Packed(chosen, old.offsets)}
        return super().run(engine, rollouts, advantages, reference, old_logprobs, state, columns=columns)


@dataclass(frozen=True, kw_only=True)
class ClipCovUpdate(CovarianceUpdate, Node, kind="clip_cov_update", unit="batch"):
    """Clip-Cov: PPO's clipped surrogate without some tokens, drawn from those with a large covariance."""

    hints_for_other_names: ClassVar[Mapping[str, str]] = {**PolicyGradient.hints_for_other_names, **CLIPPING}

    clip_eps: ClipShare = 0.2
    """The distance from 1 at which the ratio is clipped."""
    clip_eps_high: ClipDistance | None = None
    """The distance above 1, where it differs."""
    min_covariance: Annotated[float, Ge(0), Le(1e9)] = 1.0
    """The covariance above which tokens are drawn."""
    max_covariance: Annotated[float, Gt(0), Le(1e9)] = 5.0
    """The covariance below which tokens are drawn."""

    def check(self, connected: frozenset[str]) -> None:
        super().check(connected)
        check_clipping(self.clip_eps, self.clip_eps_high)
        if self.max_covariance <= self.min_covariance:
            fact = f"{self.max_covariance:g} is not above min_covariance, so no token would be drawn"
            raise RecipeError("max_covariance", fact, fix=f"more than {self.min_covariance:g}")

    def choose(self, covariances: NDArray[np.float64], count: int, step: int) -> NDArray[np.int64]:
        """Draw tokens between the bounds, by the number of the step."""
        large = np.flatnonzero((covariances > self.min_covariance) & (covariances < self.max_covariance))
        return np.random.default_rng(step).permutation(large)[:count]

    def surrogate_formula(self, advantage: str) -> Formula:
        term = clipped_expression(advantage, self.clip_eps, self.clip_eps_high, None)
        bounds = f"{self.min_covariance:g} to {self.max_covariance:g}"
        drawn = f"0 for {self.share:.4%} of the tokens, drawn from those with a covariance of {bounds}, else 1"
        return Formula(symbol="L", expression=f"k ({term})", where={"k": drawn, "w": "p / p_old"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        ratios, chosen = ratio(logprobs - columns["old_logprobs"]), columns["chosen"]
        loss, metrics = clipped_surrogate(ratios, columns["advantages"], self.clip_eps, self.clip_eps_high)
        return loss * (1 - chosen), {**metrics, "chosen": chosen}


@dataclass(frozen=True, kw_only=True)
class KlCovUpdate(CovarianceUpdate, Node, kind="kl_cov_update", unit="batch"):
    """KL-Cov: -r A, and for the tokens with the largest covariances a penalty for moving away from the old policy."""

    penalty: Coefficient = 1.0
    """The factor of |log r|."""

    def choose(self, covariances: NDArray[np.float64], count: int, step: int) -> NDArray[np.int64]:
        """Return the tokens with the largest covariances."""
        return np.argsort(-covariances, kind="stable")[:count]

    def surrogate_formula(self, advantage: str) -> Formula:
        largest = f"1 for the {self.share:.4%} of the tokens with the largest covariances, else 0"
        expression = f"-w {advantage} + k {times(self.penalty, '|log w|')}"
        return Formula(symbol="L", expression=expression, where={"k": largest, "w": "p / p_old"})

    def surrogate(self, logprobs: "Tensor", columns: "Columns") -> "Loss":
        difference, chosen = logprobs - columns["old_logprobs"], columns["chosen"]
        loss = self.penalty * chosen * difference.abs() - ratio(difference) * columns["advantages"]
        return loss, {"chosen": chosen}
