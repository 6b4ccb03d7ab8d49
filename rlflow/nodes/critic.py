"""A critic: generalized advantage estimation from its values, and its training on the returns.

Shapes: B rollouts, T response tokens, of all rollouts together or of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le, Unit
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Metrics, Packed, Rewards, Rollouts, TokenAdvantages, ValueEstimates
from rlflow.batch.packed import offsets_of
from rlflow.engines.base import Entropy, TrainsValues
from rlflow.nodes.advantages import WHITENED, whiten
from rlflow.nodes.base import Formula, Node
from rlflow.nodes.expressions import times
from rlflow.nodes.kl import Estimator, KlCoefficient, check_kl, kl_expression, old_difference, token_kl
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.schema import ClipDistance, Coefficient, Count, Divergence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class GaeAdvantages(TokenAdvantages):
    """Advantages together with the returns that the critic is to learn, and a measure of its values."""

    returns: Packed
    """B rows of float32, a value a response token: what a critic should have expected before it. NaN where excluded."""
    explained_variance: float
    """The share of the variance of all tokens' returns that the critic's values explain:
    1 - Var(return - value) / Var(return)."""
    kl: float
    """The mean KL divergence from the reference in nats a response; 0 without a reference."""

    def metrics(self) -> Mapping[str, float]:
        """Return the critic's explained variance and the KL divergence."""
        return {"explained_variance": self.explained_variance, "kl": self.kl}


@dataclass(frozen=True, kw_only=True)
class GaeAdvantage(Node, kind="gae_advantage", unit="batch", reads_tokens=True):
    """A_t = d_t + gamma lam A_t+1, where d_t = r_t + gamma V_t+1 - V_t. The return of a token is A_t + V_t.

    Each token of the model is a step. The response ends with its last token, also where it was cut at the limit: the
    value after it is zero. The reward comes with the last token; an environment's reward for a turn comes with the last
    token of that turn. Each token costs ``kl_coef`` times its KL divergence from the ``reference``. Rollouts without a
    reward count in no mean, and have neither advantages nor returns.

    Source: GAE (arXiv 1506.02438), equation 16; PPO (arXiv 1707.06347), equations 11 and 12. The penalty: Ziegler et
    al. (arXiv 1909.08593), equation 2, as in InstructGPT (arXiv 2203.02155).
    """

    gamma: Annotated[float, Ge(0.001), Le(1)] = 1.0
    """The discount of a reward for each token before it."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """How far ahead actual rewards count before the critic's value takes over: 1 to the end, 0 one token."""
    kl_coef: Coefficient = 0.0
    """The coefficient of the KL divergence in the reward. Needs a ``reference``."""
    kl_estimator: Estimator = "k1"
    """The estimator of a token's divergence; docs/algorithms.md compares them."""
    kl_target: Annotated[Divergence, Unit("nats per response")] | None = None
    """A divergence of responses. ``kl_coef`` is then the start value, and follows the target from step to step."""
    normalize: bool = True
    """Normalize advantages over all tokens of the batch. Returns are not normalized."""
    unbiased: bool = False
    """Divide the variance by n - 1 tokens (as verl) in place of n (as OpenRLHF)."""

    def check(self, connected: frozenset[str]) -> None:
        check_kl(self.kl_coef, self.kl_target, connected)

    def new_state(self) -> KlCoefficient | None:
        return None if self.kl_target is None else KlCoefficient(self.kl_coef)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward = f"{symbols['rewards']} at the last token, 0 before"
        where = {"x": f"sum over the tokens from t on of {self.gamma * self.lam:g}^(distance to t) delta"}
        value = symbols["values"]
        where["delta"] = f"r_t + {times(self.gamma, f'next {value}')} - {value}"
        if self.kl_coef and "reference" in symbols:
            kl = times(self.kl_coef, kl_expression(self.kl_estimator, "d_old"))
            where |= {"r_t": f"({reward}) - {kl}", **old_difference(symbols)}
        else:
            where["r_t"] = reward
        return Formula(symbol="A", expression=WHITENED if self.normalize else "x", where=where)

    def run(
        self,
        rollouts: Rollouts,
        rewards: Rewards,
        values: ValueEstimates,
        reference: Logprobs | None = None,
        old_logprobs: Logprobs | None = None,
        state: KlCoefficient | None = None,
    ) -> GaeAdvantages:
        is_own, offsets = rollouts.own_tokens().values, offsets_of(rollouts.own_lengths)
        has_own = rollouts.own_lengths > 0
        known, last = ~np.isnan(rewards.values) & has_own, offsets[1:][has_own] - 1
        expected = values.values.values[is_own].astype(np.float64)
        token_rewards, kl = np.zeros_like(expected), 0.0
        if reference is not None:
            divergence = token_kl(self.kl_estimator, rollouts, reference, old_logprobs).values[is_own]
            token_rewards -= (self.kl_coef if state is None else state.kl_coef) * divergence
            before = np.concatenate([[0.0], np.cumsum(divergence)])
            kl = float(np.diff(before[offsets])[known].mean())
        if state is not None and self.kl_target is not None:
            state.follow(kl, self.kl_target)
        if rewards.turns is None:
            token_rewards[last] += rewards.values[has_own]
        else:
            token_rewards[rollouts.turn_lengths.values.cumsum() - 1] += rewards.turns.values
            token_rewards[last] += np.where(known[has_own], 0, np.nan)
        next_values = np.append(expected[1:], 0.0)
        next_values[last] = 0.0
        errors = Packed(token_rewards + self.gamma * next_values - expected, offsets)
        advantages = discounted_sums(errors, self.gamma * self.lam)
        returns = advantages + expected
        variance = np.nanvar(returns)
        weights = np.ones(len(advantages), np.bool_)
        normalized = whiten(advantages, weights, unbiased=self.unbiased) if self.normalize else advantages
        return GaeAdvantages(
            values=_spread_over_tokens(normalized, is_own, values.values),
            excluded=~known,
            returns=_spread_over_tokens(returns, is_own, values.values),
            explained_variance=float(1 - np.nanvar(advantages) / variance) if variance else 0.0,
            kl=kl,
        )


def discounted_sums(column: Packed, discount: float) -> NDArray[np.float64]:
    """Return for each value [T] the sum of itself and the later values of its row, discounted by their distance."""
    lengths = column.lengths
    order = np.argsort(-lengths, kind="stable")
    ends = column.offsets[1:][order]
    # All rows at once, from their ends. The longest rows come first, so the rows with a given position are a prefix.
    positions = np.arange(2, lengths.max(initial=0) + 1)
    counts = np.searchsorted(-lengths[order], -positions, side="right")
    sums = column.values.astype(np.float64)
    for position, count in zip(positions, counts, strict=True):
        at = ends[:count] - position
        sums[at] += discount * sums[at + 1]
    return sums


def _spread_over_tokens(values: NDArray[np.float64], is_own: NDArray[np.bool_], column: Packed) -> Packed:
    """Return the values of the model's own tokens as rows like ``column``, with 0 for the other tokens."""
    spread = np.zeros(len(is_own), np.float32)
    spread[is_own] = values
    return column.like(spread)


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Half the squared distance to the return, with the value clipped.

    A value that moved further than ``clip_eps`` from its value before the step counts as if it had stopped there, where
    that is the larger loss: such a token has no gradient.

    Source: Engstrom et al. (arXiv 2005.12729), section 3, after openai/baselines. Columns: ``old_values``, ``returns``.
    """

    clip_eps: float | None
    temperature: float = 1.0
    """The temperature of the logits, which a value head does not have."""
    entropy: Entropy = "unused"

    def __call__(self, values: "Tensor", columns: "Mapping[str, Tensor]") -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss [T], and the share of clipped tokens."""
        old, returns = columns["old_values"], columns["returns"]
        free = (values - returns) ** 2 / 2
        if self.clip_eps is None:
            return free, {}
        moved = values - old
        bounded = (old + moved.clamp(-self.clip_eps, self.clip_eps) - returns) ** 2 / 2
        clipped = (moved.abs() > self.clip_eps) & (bounded > free)
        return bounded.where(clipped, free), {"clip_fraction": clipped.float()}


@dataclass(frozen=True, kw_only=True)
class ValueUpdate(Node, kind="value_update", unit="batch"):
    """Train the critic on the returns. Every token has the same weight. Excluded rollouts are in no minibatch."""

    clip_eps: ClipDistance | None = 0.2
    """The distance from the value before the step at which a value is clipped. Null: no clipping."""
    num_minibatches: Count = 1
    """The number of optimizer steps that the rollouts are divided among. With the policy's number, the minibatches are
    the same."""
    num_epochs: Annotated[int, Ge(1), Le(100)] = 1
    """How often a step trains on its rollouts; prompts are shuffled after the first time."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        term, old = "(v - R)^2 / 2", symbols["values"]
        if self.clip_eps is not None:
            term = f"max({term}, (clip(v, {old} - {self.clip_eps:g}, {old} + {self.clip_eps:g}) - R)^2 / 2)"
        where = {"v": "the critic's value", "R": f"x + {old}, the advantage before it is normalised plus {old}"}
        return Formula(symbol="L", expression=f"{Weighting().expression('responses')} of [{term}]", where=where)

    def run(
        self, engine: TrainsValues, rollouts: Rollouts, values: ValueEstimates, advantages: GaeAdvantages
    ) -> Metrics:
        if not advantages.is_included.all():
            known = np.flatnonzero(advantages.is_included)
            rollouts, values, advantages = rollouts.take(known), values.take(known), advantages.take(known)
        steps = train(
            engine,
            replace(rollouts, routing=None),  # a critic chooses its own experts
            {"old_values": values.values, "returns": advantages.returns},
            ValueLoss(clip_eps=self.clip_eps),
            OptimizerSteps(num_minibatches=self.num_minibatches, num_epochs=self.num_epochs),
        )
        return Metrics(values=mean_metrics(steps))
