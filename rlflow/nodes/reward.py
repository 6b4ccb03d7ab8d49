"""Judging responses."""

from dataclasses import dataclass

import numpy as np

from rlflow.batch import Rewards, Rollouts
from rlflow.errors import RecipeError, first_line
from rlflow.nodes.base import Node
from rlflow.rewards import find_reward


@dataclass(frozen=True, kw_only=True)
class Reward(Node, kind="reward", unit="sample"):
    """A number for each rollout, from a function of rlflow.rewards or ``package.module:function``."""

    function: str

    def check(self, connected: frozenset[str]) -> None:
        find_reward(self.function)

    def run(self, rollouts: Rollouts) -> Rewards:
        function = find_reward(self.function)
        try:
            given = list(function(tuple(rollouts.texts), tuple(rollouts.rows)))
            values = np.array([float(value) for value in given], np.float32)
        except Exception as error:  # whatever the user's own function raises
            raise RecipeError(
                "function",
                f"'{self.function}' failed ({first_line(error)})",
                fix="it is called with the responses' texts and the data set's rows, and returns a number for each",
            ) from error
        if len(values) != len(rollouts):
            raise RecipeError(
                "function",
                f"'{self.function}' returned {len(values)} values for {len(rollouts)} responses",
                fix="return one number a response, in their order",
            )
        if (wrong := np.flatnonzero(~np.isfinite(values))).size:
            first = wrong[0]
            raise RecipeError(
                "function",
                f"'{self.function}' returned {values[first]} for the response {rollouts.texts[first]!r}",
                fix="return a finite number for every response",
            )
        return Rewards(values=values)
