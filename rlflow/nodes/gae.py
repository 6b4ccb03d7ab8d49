"""From a critic's values to advantages, and to what the critic is to learn.

Shapes: B rollouts, T response tokens of all of them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from rlflow.batch import GaeAdvantages, Logprobs, Packed, Rewards, Rollouts, ValueEstimates
from rlflow.nodes.advantages import WHITENED, whitened
from rlflow.nodes.base import Formula, Node, kl_expression, old_difference, times
from rlflow.nodes.kl import Estimator, check_kl, token_kl
from rlflow.packed import offsets_of


@dataclass(frozen=True, kw_only=True)
class GaeAdvantage(Node, kind="gae_advantage", unit="batch", reads_tokens=True):
    """A_t = d_t + gamma lam A_t+1, where d_t = r_t + gamma V_t+1 - V_t. The return of a token is A_t + V_t.

    Each token of the model is a step, and the response ends with its last one, also where it was cut at the limit:
    nothing is expected after it. The reward comes with the last token. Each token costs ``kl_coef`` times its KL
    divergence from the ``reference``. Rollouts without a reward count in no mean, and have neither advantages nor
    returns.

    Source: GAE (arXiv 1506.02438), equation 16; PPO (arXiv 1707.06347), equations 11 and 12. The penalty: Ziegler et
    al. (arXiv 1909.08593), equation 2, as in InstructGPT (arXiv 2203.02155).
    """

    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """What a reward counts a token earlier."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """How far ahead rewards count themselves, and not what is expected of them: 1 to the end, 0 one token."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Of the KL divergence in the reward. Needs a ``reference``."""
    kl_estimator: Estimator = "k1"
    kl_target: Annotated[float, Gt(0)] | None = None
    """Nats a response, which ``kl_coef``, then where it begins, is adapted to from step to step."""
    normalize: bool = True
    """Advantages are normalised over all tokens of the batch. Returns are not."""
    unbiased: bool = False
    """Divide the variance by n - 1 tokens (as verl) in place of n (as OpenRLHF)."""

    def check(self, connected: frozenset[str]) -> None:
        check_kl(self.kl_coef, self.kl_target, connected)

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
    ) -> GaeAdvantages:
        own, offsets = rollouts.own_tokens().values, offsets_of(rollouts.own_lengths)
        has_own = rollouts.own_lengths > 0
        known, last = ~np.isnan(rewards.values) & has_own, offsets[1:][has_own] - 1
        expected = values.values.values[own].astype(np.float64)
        gained, kl = np.zeros_like(expected), 0.0
        if reference is not None:
            divergence = token_kl(self.kl_estimator, rollouts, reference, old_logprobs).values[own]
            gained -= self.kl_coef * divergence
            before = np.concatenate([[0.0], np.cumsum(divergence)])
            kl = float(np.diff(before[offsets])[known].mean())
        gained[last] += rewards.values[has_own]
        following = np.append(expected[1:], 0.0)
        following[last] = 0.0
        errors = Packed(gained + self.gamma * following - expected, offsets)
        advantages = discounted_sums(errors, self.gamma * self.lam)
        returns = advantages + expected
        variance = np.nanvar(returns)
        everywhere = np.ones(len(advantages), np.bool_)
        given = whitened(advantages, everywhere, unbiased=self.unbiased) if self.normalize else advantages
        return GaeAdvantages(
            values=_among_all(given, own, values.values),
            excluded=~known,
            returns=_among_all(returns, own, values.values),
            explained_variance=float(1 - np.nanvar(advantages) / variance) if variance else 0.0,
            kl=kl,
        )

    def measured_kl(self, output: GaeAdvantages, inputs: Mapping[str, Any]) -> float:
        return output.kl


def _among_all(values: NDArray[np.float64], own: NDArray[np.bool_], column: Packed) -> Packed:
    """As rows of ``column``: values of the model's own tokens, and 0 for the others."""
    whole = np.zeros(len(own), np.float32)
    whole[own] = values
    return column.like(whole)


def discounted_sums(column: Packed, discount: float) -> NDArray[np.float64]:
    """[T]: each value and those after it in its row, each ``discount`` times what the one before it counts."""
    lengths = column.lengths
    order = np.argsort(-lengths, kind="stable")
    ends = column.offsets[1:][order]
    # All rows at once, from their ends: the longest stand first, and so many of them have so many places.
    places = np.arange(2, lengths.max(initial=0) + 1)
    counts = np.searchsorted(-lengths[order], -places, side="right")
    sums = column.values.astype(np.float64)
    for place, count in zip(places, counts, strict=True):
        at = ends[:count] - place
        sums[at] += discount * sums[at + 1]
    return sums
