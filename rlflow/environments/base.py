"""What an environment is, and what it answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from rlflow.rewards.base import Row
from rlflow.schema import Section


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn of the model."""

    text: str = ""
    """What the model reads before its next turn. That of the last answer nobody reads."""
    done: bool = False
    """The conversation is over."""
    reward: float = 0.0
    """For this turn: those of all turns are added up."""


@dataclass
class Environment(Section, ABC):
    """The other side of one conversation. A class of your own derives from this; its fields are its options.

    It is a new object for each conversation, and what it sets on itself is its state. Between two turns that is bytes,
    by ``pickle``: each turn may be taken in another process, and again from where it began if that process is killed.
    """

    batch_size: ClassVar[int] = 1
    """Conversations of which one call takes a turn: more than one for turns of much less than a millisecond."""

    def reset(self, row: Row) -> None:
        """The beginning, ``row`` being that of the data set. What the model reads first is the row's prompt."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """The answer to what the model has written in its turn, without special tokens."""
