"""How a model and an environment take turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from rlflow.environments.turn import Turns
from rlflow.schema import Count, Section


@dataclass(frozen=True, kw_only=True)
class TurnTaking(Section):
    """What both sides go by."""

    environment: str
    """Of rlflow.environments.classes, or ``package.module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    max_turns: Count
    """Of the model."""
    turn_tokens: Count
    """Of one turn of the model."""
    max_tokens: Count
    """Of the whole response, the environment's tokens included."""
    stop: tuple[str, ...] = ()
    """A turn ends with any of these, each a single token, as with the model's own end token."""
    frame: str = "{}"
    """What stands around what the environment says, in the place of the braces: where a chat template has several
    sides, the marks between them."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Of one call of the environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """Where the environment fails the run ends, or the response is left out, as if it had not been written."""

    @property
    def turns(self) -> Turns:
        return Turns(self.environment, self.options, self.timeout_s)
