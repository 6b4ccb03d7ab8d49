"""An environment that says how often it was spoken to."""

from rlflow.environments.base import Environment, Observation
from rlflow.rewards.base import Row


class Echo(Environment):
    """An environment that ends at a text from its row."""

    def reset(self, row: Row) -> None:
        self.heard, self.last = 0, row["last"]

    def step(self, text: str) -> Observation:
        self.heard += 1
        if text == "13":
            raise RuntimeError("unlucky")
        return Observation(str(self.heard) * self.heard, done=text == self.last, reward=0.25)
