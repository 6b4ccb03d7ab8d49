"""What is taken off rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt

from rlflow.batch import Divergences, Logprobs, Rewards, Rollouts
from rlflow.errors import RecipeError
from rlflow.nodes.base import Formula, Node, kl_expression, old_difference, times
from rlflow.nodes.kl import Estimator, check_target, token_kl


@dataclass(frozen=True, kw_only=True)
class KlDivergence(Node, kind="kl_divergence", unit="sample"):
    """From the reference, summed over each response; the policy is ``old_logprobs`` where such a node is there, else
    what the engine sampled with."""

    kl_estimator: Estimator = "k1"

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        summed = f"sum of {kl_expression(self.kl_estimator, 'd_old')} over the response"
        return Formula(symbol="KL", expression=summed, where=old_difference(symbols))

    def run(self, rollouts: Rollouts, reference: Logprobs, old_logprobs: Logprobs | None = None) -> Divergences:
        kl = token_kl(self.kl_estimator, rollouts, reference, old_logprobs)
        return Divergences(values=np.add.reduceat(kl.values, kl.offsets[:-1]).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class KlPenalty(Node, kind="kl_penalty", unit="sample", reads_tokens=False):
    """The reward minus ``kl_coef`` times the KL divergence of the response.

    Source: RLOO (arXiv 2402.14740); Ziegler et al. (arXiv 1909.08593), equation 2.
    """

    kl_coef: Annotated[float, Ge(0)]
    kl_target: Annotated[float, Gt(0)] | None = None
    """Nats a response, which ``kl_coef``, then where it begins, is adapted to from step to step."""

    def check(self, connected: frozenset[str]) -> None:
        check_target(self.kl_coef, self.kl_target)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="r", expression=f"{symbols['rewards']} - {times(self.kl_coef, symbols['kl'])}")

    def run(self, rewards: Rewards, kl: Divergences) -> Rewards:
        return Rewards(values=(rewards.values - self.kl_coef * kl.values).astype(np.float32))

    def measured_kl(self, output: Rewards, inputs: Mapping[str, Any]) -> float:
        """Of the rollouts that have a reward."""
        return float(np.mean(inputs["kl"].values[~np.isnan(output.values)], dtype=np.float64))


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Node, kind="overlong_penalty", unit="sample", reads_tokens=False):
    """The reward minus up to one for the last ``buffer_tokens`` before the limit: a line from 0 to 1.

    Source: DAPO's soft overlong punishment (arXiv 2503.14476), equation 13.
    """

    max_tokens: Annotated[int, Ge(1)]
    """The limit of a response: that of the node that writes it. Of a conversation all tokens count."""
    buffer_tokens: Annotated[int, Ge(1)]

    def check(self, connected: frozenset[str]) -> None:
        if self.buffer_tokens > self.max_tokens:
            fact = f"{self.buffer_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("buffer_tokens", fact, fix="a part of max_tokens")

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        over = f"clip((tokens - {self.max_tokens - self.buffer_tokens}) / {self.buffer_tokens}, 0, 1)"
        return Formula(symbol="r", expression=f"{symbols['rewards']} - {over}")

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Rewards:
        over = rollouts.response_ids.lengths - (self.max_tokens - self.buffer_tokens)
        penalties = np.clip(over / self.buffer_tokens, 0, 1)
        return Rewards(values=(rewards.values - penalties).astype(np.float32))
