"""The options of conversations with an environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.environments.turn import EnvironmentSpec
from rlflow.schema import Count, Seconds, Section, Text

CHAT_FRAME = "chat"


@dataclass(frozen=True, kw_only=True)
class TurnOptions(Section):
    """The options of a conversation's turns."""

    environment: str
    """A name from rlflow.environments.classes, or ``package.module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    max_turns: Count
    """The limit of the model's turns."""
    turn_tokens: Count
    """The limit of one turn of the model, in tokens."""
    max_tokens: Count
    """The limit of the whole response, in tokens; the environment's tokens count."""
    stop: tuple[Text, ...] = ()
    """Texts that end a turn, each a single token, as the model's own end token does."""
    frame: str = "{}"
    """The text around the environment's answer, which stands in the place of the braces; or ``chat``: what the model's
    chat template has around a message of the user after one of the assistant."""
    processes: Count | None = None
    """The worker processes of the environment beside each engine; by default one for each of the engine's CPUs. An
    environment that waits for a service needs more: each process makes one call at a time."""
    timeout_s: Seconds = 10.0
    """The time limit of one call of the environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """The result of a failing environment: the run stops, or the response is excluded from training."""

    @property
    def environment_spec(self) -> EnvironmentSpec:
        """Return the environment as worker processes build it."""
        return EnvironmentSpec(self.environment, self.options, self.timeout_s)
