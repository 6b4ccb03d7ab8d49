"""What an environment is, and what it answers.

From the name of an environment to an object of it that has its options.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlflow.environments import classes
from rlflow.errors import RecipeError
from rlflow.plugins import load_object
from rlflow.rewards.base import Row
from rlflow.rewards.callables import registered
from rlflow.schema import Section, parse


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


def find_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """A file of rlflow.environments.classes, or ``package.module:Class``, before its first conversation.

    Raises RecipeError at the paths ``environment`` and ``options``.
    """
    path = "environment"
    kind = load_object(name, path) if ":" in name else registered(classes, name, path, "environment").ENVIRONMENT
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise RecipeError(
            path, f"'{name}' is not an Environment", fix="derive it from rlflow.environments.base.Environment"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise RecipeError(path, f"'{name}' has no {' and '.join(missing)}", fix="see docs/environments.md")
    return parse(kind, options, "options")
