"""What a pool's workers call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rlflow.rewards.base import outcome


def nothing() -> None:
    """Most functions need no preparation."""


@dataclass(frozen=True)
class Found:
    call: Callable[[Sequence[str], Sequence[Any]], Iterable[Any]]
    """A RewardFunction, or what takes steps of an environment."""
    batch_size: int
    """Responses of one call."""
    limit_s: float
    """A call that takes longer is ended from outside."""
    keeps_time: bool = False
    """It is told how long it may take. A call that is late for all that would be so again, a response at a time."""
    prepare: Callable[[], None] = nothing
    """Imports what takes long; called once, before workers are forked."""
    check: Callable[[Any, str], Any] = outcome
    """What becomes of the value that was given for a text."""


class Findable(Protocol):
    """What says how to find it: it travels to the processes that call it."""

    what: ClassVar[str]
    """For messages."""

    @property
    def timeout_s(self) -> float:
        """Of one call."""

    def find(self, name: str) -> Found:
        """Raises RecipeError."""
