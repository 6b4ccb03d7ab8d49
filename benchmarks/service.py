"""An environment that waits, as for a service, and then answers."""

import time
from dataclasses import dataclass

import numpy as np

from rlflow.environments.base import Environment, Observation
from rlflow.rewards.base import Row

# Seconds of a call: log-normal with this median and spread, within these bounds.
MEDIAN_S, SPREAD, SHORTEST_S, LONGEST_S = 0.3, 0.8, 0.05, 2.0


def delay(conversation: int, turn: int) -> float:
    """Return the seconds that the answer to a turn takes."""
    drawn = np.random.default_rng([conversation, turn]).lognormal(np.log(MEDIAN_S), SPREAD)
    return float(np.clip(drawn, SHORTEST_S, LONGEST_S))


@dataclass
class Service(Environment):
    """Ends each conversation after the same number of turns."""

    num_turns: int = 8

    def reset(self, row: Row) -> None:
        self.conversation, self.turn = int(row["number"]), 0

    def step(self, text: str) -> Observation:
        time.sleep(delay(self.conversation, self.turn))
        self.turn += 1
        return Observation("=1+1", done=self.turn == self.num_turns, reward=1.0)
