"""Scores of existing responses by a role's model: logprobs and values."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.batch import Logprobs, Rollouts, Sequences, ValueEstimates
from rlflow.engines.base import Scores, ScoresBase, Values
from rlflow.nodes.base import Formula, Node


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


def _temperature(sequences: Sequences) -> float:
    return sequences.temperature if isinstance(sequences, Rollouts) else 1.0
