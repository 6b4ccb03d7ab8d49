"""An environment that does what it should not, chosen by the text of the turn."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rlflow.environments.base import Environment, Observation
from rlflow.rewards.base import Row


class Misbehaving(Environment):
    batch_size = 4

    def reset(self, row: Row) -> None:
        self.turns = 0
        if row.get("number") == "raise":
            raise KeyError("number")

    def step(self, text: str) -> Observation:
        self.turns += 1
        given: Observation = DOES[text](self)
        return given

    def keep(self, what: Any) -> Observation:
        self.kept = what
        return Observation()


class Telling(str):
    """A text of a class that only its own process knows."""


DOES: dict[str, Callable[[Misbehaving], Any]] = {
    "good": lambda self: Observation(str(self.turns), reward=0.5),
    "end": lambda self: Observation(done=True, reward=1),
    "hang": lambda self: time.sleep(1000),
    "raise": lambda self: 1 // 0,
    "exit": lambda self: sys.exit(3),
    "nothing": lambda self: None,
    "a text": lambda self: "no",
    "no text": lambda self: Observation(7),  # type: ignore[arg-type]
    "perhaps": lambda self: Observation(done=2),  # type: ignore[arg-type]
    "NaN": lambda self: Observation(reward=float("nan")),
    "endless": lambda self: Observation("1" * (2**20 + 1)),
    "its own kind": lambda self: Observation(Telling("1")),
    "keep a file": lambda self: self.keep(sys.stdin),
    "keep much": lambda self: self.keep("1" * 17 * 2**20),
}
