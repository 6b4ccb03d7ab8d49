"""A guessing game: the model guesses a number and reads whether the right one is higher or lower."""

import re
from dataclasses import dataclass

from rlflow.environments.base import Environment, Observation
from rlflow.rewards.base import Row

_NUMBER = re.compile(r"\d+")


@dataclass
class Guessing(Environment):
    """A game about the row's ``number``, with a reward of 1 for finding it. Turns without a guess get no answer."""

    batch_size = 64

    higher: str = ">"
    """The answer to a guess that is too low."""
    lower: str = "<"
    """The answer to a guess that is too high."""

    def reset(self, row: Row) -> None:
        self.number = int(row["number"])

    def step(self, text: str) -> Observation:
        guesses = _NUMBER.findall(text)
        if not guesses:
            return Observation()
        guess = int(guesses[-1][:100])
        if guess == self.number:
            return Observation(done=True, reward=1.0)
        return Observation(self.higher if self.number > guess else self.lower)


ENVIRONMENT = Guessing
