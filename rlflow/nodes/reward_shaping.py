"""Penalties that are subtracted from rewards: for the KL divergence from the reference, and for long responses.

Shapes: B rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Unit

from rlflow.batch import Divergences, Logprobs, Rewards, Rollouts, Sequences
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import Formula, Node, NodeView
from rlflow.nodes.expressions import times
from rlflow.nodes.kl import Estimator, KlCoefficient, check_target, kl_expression, old_difference, token_kl
from rlflow.schema import Coefficient, Count, Divergence


@dataclass(frozen=True, kw_only=True)
class KlDivergence(Node, kind="kl_divergence", unit="sample"):
    """The KL divergence from the reference, summed over each response.

    The policy's logprobs are ``old_logprobs``, or without them those of the engine that sampled the rollouts.
    """

    kl_estimator: Estimator = "k1"
    """The estimator of a token's divergence; docs/algorithms.md compares them."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        summed = f"sum of {kl_expression(self.kl_estimator, 'd_old')} over the response"
        return Formula(symbol="KL", expression=summed, where=old_difference(symbols))

    def check_graph(self, view: NodeView) -> None:
        if not any(view.generators()) and "old_logprobs" not in view.node.inputs:
            fact = "needs the policy's logprobs of responses that no node samples"
            raise GraphError(f"{view.path}.old_logprobs", fact, fix="a node 'logprobs' with the policy's role")

    def run(self, rollouts: Sequences, reference: Logprobs, old_logprobs: Logprobs | None = None) -> Divergences:
        kl = token_kl(self.kl_estimator, rollouts, reference, old_logprobs)
        return Divergences(values=np.add.reduceat(kl.values, kl.offsets[:-1]).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class KlPenalty(Node, kind="kl_penalty", unit="sample", reads_tokens=False):
    """The reward minus ``kl_coef`` times the KL divergence of the response.

    Source: RLOO (arXiv 2402.14740); Ziegler et al. (arXiv 1909.08593), equation 2.
    """

    kl_coef: Coefficient
    """The factor of the divergence, which is subtracted from the reward."""
    kl_target: Annotated[Divergence, Unit("nats per response")] | None = None
    """A divergence of responses. ``kl_coef`` is then the start value, and follows the target from step to step."""

    def check(self, connected: frozenset[str]) -> None:
        check_target(self.kl_coef, self.kl_target)

    def new_state(self) -> KlCoefficient | None:
        return None if self.kl_target is None else KlCoefficient(self.kl_coef)

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="r", expression=f"{symbols['rewards']} - {times(self.kl_coef, symbols['kl'])}")

    def run(self, rewards: Rewards, kl: Divergences, state: KlCoefficient | None = None) -> Rewards:
        kl_coef = self.kl_coef if state is None else state.kl_coef
        output = rewards.less(kl_coef * kl.values)
        if state is not None and self.kl_target is not None:
            state.follow(float(np.mean(kl.values[~np.isnan(output.values)], dtype=np.float64)), self.kl_target)
        return output


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Node, kind="overlong_penalty", unit="sample", reads_tokens=False):
    """The reward minus a penalty that rises from 0 to 1 over the last ``buffer_tokens`` before the limit.

    Source: DAPO's soft overlong punishment (arXiv 2503.14476), equation 13.
    """

    max_tokens: Count
    """The limit of a response, as in the node that generates it. All tokens of a conversation count."""
    buffer_tokens: Count
    """The last tokens before the limit, over which the penalty rises."""

    def check(self, connected: frozenset[str]) -> None:
        if self.buffer_tokens > self.max_tokens:
            fact = f"{self.buffer_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("buffer_tokens", fact, fix=f"use {self.max_tokens} or less")

    def check_graph(self, view: NodeView) -> None:
        for generator in view.generators():
            sampling = generator.operation.sampling
            if sampling is not None and self.max_tokens > (limit := sampling.max_tokens):
                fact = f"{self.max_tokens} is more than graph.{generator.name}.max_tokens, which is {limit}"
                raise RecipeError(f"{view.path}.max_tokens", fact, fix=f"{view.path}.max_tokens={limit}")

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        over = f"clip((tokens - {self.max_tokens - self.buffer_tokens}) / {self.buffer_tokens}, 0, 1)"
        return Formula(symbol="r", expression=f"{symbols['rewards']} - {over}")

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Rewards:
        over = rollouts.response_ids.lengths - (self.max_tokens - self.buffer_tokens)
        return rewards.less(np.clip(over / self.buffer_tokens, 0, 1))
