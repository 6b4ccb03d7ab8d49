"""What a reward function gives for a response: a number, or a failure with a reason.

What a pool's workers call.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from rlflow.errors import first_line

Kind = Literal["raised", "invalid", "unreadable", "timeout", "died", "unavailable"]
"""The function raised; gave something that is no finite number, or not as many as responses; cannot use what the row
has; took too long; ended its process; or does not reach what it needs."""

Row = Mapping[str, Any]
"""Of the data set: what a response is compared with."""


_LONGEST_REASON = 300


@dataclass(frozen=True)
class Failure:
    """There is no reward for a response."""

    kind: Kind
    reason: str
    """Follows the function's name: ``took longer than 10 s``. Cut where it is long: what others say has no bound."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:_LONGEST_REASON])


Outcome = float | Failure

RewardFunction = Callable[[Sequence[str], Sequence[Row]], Sequence[Outcome]]
"""From the texts of some responses and their rows to as many outcomes. What it gives for one response does not depend
on which others there are."""

F = TypeVar("F", bound=Callable[..., Any])

LARGEST = 3.4028234663852886e38
"""The largest number of float32, which rewards become."""


def batched(size: int) -> Callable[[F], F]:
    """Marks a function that is to be called with so many responses at once, and not with one."""

    def mark(function: F) -> F:
        function.batch_size = size  # type: ignore[attr-defined]
        return function

    return mark


def text_of(row: Row, column: str) -> str | Failure:
    """Return the row's value in ``column`` as text, or a Failure where it is missing, null or NaN.

    ``str`` of such a value is a text as well, such as "None", and a comparison with it is always false.
    """
    value = row.get(column)
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return Failure("unreadable", f"found no '{column}' in the row ({'missing' if column not in row else value})")
    return str(value)


def outcome(value: Any, text: str) -> Outcome:
    """Return what a function gave for the response ``text`` as a finite number, or a Failure where it is none."""
    if isinstance(value, Failure):
        return value
    if isinstance(value, str | bytes | bytearray):
        return Failure("invalid", f"returned the text {str(value)[:80]!r} in place of a number")
    try:
        number = float(value)
    except Exception as error:
        return Failure("invalid", f"failed ({first_line(error)})")
    if not abs(number) <= LARGEST:
        return Failure("invalid", f"returned {number} for the response {text[:80]!r}")
    return number


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
