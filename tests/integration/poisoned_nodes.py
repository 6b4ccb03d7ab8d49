"""Nodes that make one value of a step NaN, in whichever process they run."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlflow.batch import Advantages, Logprobs, Metrics, Rollouts, TokenAdvantages
from rlflow.engines.base import Trains
from rlflow.nodes.base import Node
from rlflow.nodes.policy_update import PolicyUpdate


@dataclass(frozen=True, kw_only=True)
class PoisonedLogprobs(Node, kind="poisoned_logprobs", unit="sample"):
    """The logprobs of the sampler, and NaN for the last token of sample 3 of prompt 1 in ``bad_step``."""

    bad_step: int

    def run(self, rollouts: Rollouts) -> Logprobs:
        values = rollouts.logprobs.values.copy()
        bad = (rollouts.keys == [self.bad_step - 1, 1, 3]).all(1)
        values[rollouts.logprobs.offsets[1:][bad] - 1] = np.nan
        return Logprobs(values=rollouts.logprobs.like(values))


@dataclass(frozen=True, kw_only=True)
class PoisonedUpdate(PolicyUpdate, Node, kind="poisoned_update", unit="batch"):
    """A policy update to which one rollout in ``bad_step`` has an infinite advantage."""

    bad_step: int

    def run(  # type: ignore[override]
        self, engine: Trains, rollouts: Rollouts, advantages: Advantages, **more: Any
    ) -> Metrics:
        if int(rollouts.keys[0, 0]) == self.bad_step - 1:
            values = np.nan_to_num(advantages.values.values)
            values[-1] = np.inf
            packed = advantages.values.like(values)
            advantages = TokenAdvantages(values=packed, excluded=np.zeros(len(rollouts), np.bool_))
        return super().run(engine, rollouts, advantages, **more)
