"""The interface of reward functions, and of everything else that a process pool can call.

A reward function returns a number for each response, or a ``Failure`` with a reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from rlflow.errors import first_line

Kind = Literal["raised", "invalid", "unreadable", "timeout", "died", "unavailable"]
"""Why there is no reward: the function raised an error; it did not return one finite number for each response; it
cannot use a value of the row; it took too long; its process died; or it cannot reach a service that it needs."""

Row = Mapping[str, Any]
"""A row of the data set, which a response is compared with."""

_MAX_REASON_LENGTH = 300

# A function that receives its timeout ends by itself. The kill comes this much later, so that a busy host does not kill
# it too early.
_GRACE_S = 0.9


@dataclass(frozen=True)
class Failure:
    """The reason why a response has no reward."""

    kind: Kind
    """The kind of mistake: ``raised``, ``invalid``, ``unreadable``, ``timeout``, ``died`` or ``unavailable``."""
    reason: str
    """Continues a sentence that starts with the function's name: ``took longer than its timeout_s of 10 s``. Long
    reasons are cut, because errors and services may return texts of any length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:_MAX_REASON_LENGTH])


@dataclass(frozen=True)
class Scored:
    """A reward with further numbers about the response, which become metrics."""

    reward: float | None
    metrics: Mapping[str, float]


Outcome = float | None | Scored | Failure
"""A reward, None where a function has nothing to say about a response, or why there is no reward."""

RewardFunction = Callable[[Sequence[str], Sequence[Row]], Sequence[Outcome]]
"""Maps the texts of some responses and their rows to as many outcomes. The outcome of a response must not depend on
the other responses of the call."""

F = TypeVar("F", bound=Callable[..., Any])

MAX_FLOAT32 = 3.4028234663852886e38
"""The largest number of float32, the type that rewards are stored in."""


def batched(size: int) -> Callable[[F], F]:
    """Mark a function to be called with ``size`` responses at once instead of one."""

    def mark(function: F) -> F:
        function.batch_size = size  # type: ignore[attr-defined]
        return function

    return mark


def to_outcome(value: Any, text: str) -> Outcome:
    """Convert the value that a function returned for the response ``text`` to an outcome with finite numbers.

    A dictionary has a ``score``. Its other values are metrics if they are finite numbers.
    """
    if not isinstance(value, Mapping):
        return None if value is None else _to_number(value, text)
    if "score" not in value:
        return Failure("invalid", f"returned a dictionary without 'score' ({', '.join(map(str, value))[:80]})")
    score = None if value["score"] is None else _to_number(value["score"], text)
    if isinstance(score, Failure):
        return score
    numbers = {str(name): _to_number(number, text) for name, number in value.items() if name != "score"}
    return Scored(score, {name: number for name, number in numbers.items() if isinstance(number, float)})


def _to_number(value: Any, text: str) -> float | Failure:
    if isinstance(value, Failure):
        return value
    if isinstance(value, str | bytes | bytearray):
        return Failure("invalid", f"returned the text {str(value)[:80]!r} instead of a number")
    try:
        number = float(value)
    except Exception as error:
        return Failure("invalid", f"failed ({first_line(error)})")
    if not abs(number) <= MAX_FLOAT32:
        return Failure("invalid", f"returned {number} for the response {text[:80]!r}")
    return number


def no_preparation() -> None:
    """Do nothing, as most functions need no preparation."""


def any_row(row: Row) -> Failure | None:
    """Return None, as functions of users do not say what they read."""
    return None


@dataclass(frozen=True)
class LoadedCallable:
    """A function that the workers of a pool can call, with its batch size and time limit."""

    call: Callable[[Sequence[str], Sequence[Any]], Iterable[Any]]
    """A RewardFunction, one that takes a JudgedResponse in the place of each row, or one that takes steps of an
    environment."""
    batch_size: int
    """Responses in one call."""
    timeout_s: float
    """Seconds that one call may take."""
    reads_tokens: bool = False
    """The function takes responses in the place of rows."""
    enforces_timeout: bool = False
    """The function receives its timeout and keeps it itself. A batch that takes too long anyway fails as a whole:
    calling it again with single responses would not help."""
    prepare: Callable[[], None] = no_preparation
    """Imports slow libraries; called once, before workers are forked."""
    check_row: Callable[[Row], Failure | None] = any_row
    """Returns why the function cannot judge any response to a row."""
    check: Callable[[Any, str], Any] = to_outcome
    """Checks or converts the value that was returned for a text."""

    serve: Callable[[socket], None] | None = None
    """Serves the worker's socket in its own way, in the place of calls, until the other end closes."""

    @property
    def limit_s(self) -> float:
        """Return the seconds after which the pool kills the worker of a call."""
        return self.timeout_s + (_GRACE_S if self.enforces_timeout else 0.0)


class CallableSpec(Protocol):
    """A picklable description of a callable. The fork server receives it and loads the callable itself."""

    kind: ClassVar[str]
    """The word for it in messages: "reward" or "environment"."""

    def load(self, name: str) -> LoadedCallable:
        """Load the callable; ``name`` is the one that the recipe gives it. Raises RecipeError."""
