"""An environment whose conversations meet: one is answered once the other has ended."""

import time
from dataclasses import dataclass
from pathlib import Path

from rlflow.environments.base import Environment, Observation
from rlflow.rewards.base import Row

TURNS = 3


@dataclass
class Meeting(Environment):
    """An environment in which the conversation of the row ``late`` starts after that of ``early`` has ended."""

    file: str
    waits: bool

    def reset(self, row: Row) -> None:
        self.name, self.turn = row["name"], 0

    def step(self, text: str) -> Observation:
        self.turn += 1
        if self.name == "early" and self.turn == TURNS:
            Path(self.file).touch()
        while self.waits and self.name == "late" and not Path(self.file).exists():
            time.sleep(0.01)
        return Observation("+1=", done=self.turn == TURNS, reward=1.0)
