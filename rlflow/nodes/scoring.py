"""Scores of existing responses by a role's model: logprobs, values and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlflow.batch import Logprobs, Rewards, Rollouts, Sequences, ValueEstimates, describe_samples
from rlflow.engines.base import Evaluates, Scores, ScoresBase, Values
from rlflow.errors import NotFiniteError
from rlflow.nodes.base import Formula, Headline, Node

REWARD_HEADLINE = Headline("mean", ".3f", is_learned=True)
REWARD_OUTPUT = "the output of the reward model's head at the last token"
"""The reward in the formulas of losses."""


@dataclass(frozen=True, kw_only=True)
class ScoreLogprobs(Node, kind="logprobs", unit="sample"):
    """The logprob of every response token under the role's model, at the temperature of the rollouts.

    Responses of the data, as with ``rollouts: pairs``, are scored at temperature 1.
    """

    def run(self, engine: Scores, rollouts: Sequences) -> Logprobs:
        return engine.logprobs(rollouts, _temperature(rollouts))


@dataclass(frozen=True, kw_only=True)
class ScoreBaseLogprobs(Node, kind="base_logprobs", unit="sample"):
    """The logprobs under the role's model without its LoRA adapters: a reference without a second model."""

    def run(self, engine: ScoresBase, rollouts: Sequences) -> Logprobs:
        return engine.base_logprobs(rollouts, _temperature(rollouts))


@dataclass(frozen=True, kw_only=True)
class ScoreValues(Node, kind="values", unit="sample"):
    """The return that the role's model expects before every response token."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="V", expression="the critic's value before the token, before the update")

    def run(self, engine: Values, rollouts: Rollouts) -> ValueEstimates:
        return engine.values(rollouts)


@dataclass(frozen=True, kw_only=True)
class RewardModel(Node, kind="reward_model", unit="sample"):
    """The reward of each response by the role's model, at the last token; none for a failed conversation."""

    headline = REWARD_HEADLINE

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="r", expression=REWARD_OUTPUT)

    def run(self, engine: Evaluates, rollouts: Rollouts) -> Rewards:
        rewards = engine.evaluate(rollouts)
        if len(bad := np.flatnonzero(~np.isfinite(rewards.values))):
            where = f"{len(bad)} of {len(rollouts)} responses ({describe_samples(rollouts.keys[bad])})"
            raise NotFiniteError(f"the reward model gives no finite number for {where}.")
        return Rewards(values=np.where(rollouts.failed, np.float32(np.nan), rewards.values))


def _temperature(sequences: Sequences) -> float:
    return sequences.temperature if isinstance(sequences, Rollouts) else 1.0
