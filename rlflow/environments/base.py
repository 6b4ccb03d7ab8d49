"""The interface of environments, and how a recipe's name and options become one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlflow.environments import classes
from rlflow.errors import RecipeError
from rlflow.plugins import builtin_module, load_object
from rlflow.rewards.base import Row
from rlflow.schema import Section, parse


@dataclass(frozen=True)
class Observation:
    """An environment's answer to one turn of the model."""

    text: str = ""
    """The text that the model reads before its next turn. The text of the last observation is not used."""
    done: bool = False
    """The conversation has ended."""
    reward: float = 0.0
    """The reward of this turn. The rewards of all turns are added up."""


@dataclass
class Environment(Section, ABC):
    """The other side of one conversation. Derive your own class from this; its fields are its options.

    Each conversation has its own object, and attributes that the object sets are its state. Between two turns the
    state is stored, because each turn may run in another process: as JSON where that can hold it, else as a pickle. A
    turn whose process is killed is repeated from the state before it.
    """

    batch_size: ClassVar[int] = 1
    """Conversations that one call advances by a turn. Use more than one if a turn takes much less than 1 ms."""
    gives_rewards: ClassVar[bool] = True
    """False if the reward of every turn is 0, so that the reward function ``environment`` is refused."""

    def reset(self, row: Row) -> None:
        """Begin a conversation about a row of the data set. The model starts from the row's prompt."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Answer the text that the model generated in its turn, which has no special tokens."""


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Create an environment that has its options and is ready for ``reset``.

    ``name`` is a file of rlflow.environments.classes, or ``package.module:Class``. Raises RecipeError at the paths
    ``environment`` and ``options``.
    """
    path = "environment"
    kind = load_object(name, path) if ":" in name else builtin_module(classes, name, path, "environment").ENVIRONMENT
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise RecipeError(
            path, f"'{name}' is not an Environment", fix="derive it from rlflow.environments.base.Environment"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise RecipeError(path, f"'{name}' has no {' and '.join(missing)}", fix="see docs/environments.md")
    return parse(kind, options, "options")
