"""The engines of a generation: how they are called, their room, and what a scheduler knows of their work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.errors import EngineError


class AllEnginesFailedError(EngineError):
    """The failure of all engines before enough groups were complete. Everything that they generated is lost."""

    def __init__(self, failures: Mapping[int, EngineError]) -> None:
        super().__init__(str(next(iter(failures.values()))))
        self.failures = failures


@dataclass(frozen=True)
class Capacity:
    """The room of one engine."""

    sequences: int
    """The most samples that it generates at once."""
    tokens: int
    """The most tokens in its KV cache."""
    interrupted: bytes = b""
    """Interrupted rows that this engine resumes best, as int32."""


@dataclass
class EngineState:
    """The work of an engine, as far as it has reported it."""

    capacity: Capacity
    running: dict[int, None] = field(default_factory=dict)
    """The rows that it generates, in the order in which they were assigned."""
    leaving: Sequence[int] = ()
    """The rows that it was asked to preempt, until it answers."""
    finished: list[int] = field(default_factory=list)
    steps: int = 0
    pace: int = 0
    """The steps between its last two messages."""
    tokens: int = 0
    """The tokens of its rows at its last message: prompts and responses."""
    may_have_room: bool = True
    """False once it had no room for the first queued row, until its rows change."""

    @property
    def load(self) -> float:
        """Return the used share of its capacity."""
        return max(len(self.running) / self.capacity.sequences, self.tokens / self.capacity.tokens)
