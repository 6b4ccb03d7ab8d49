"""One reward of a node: which function, its weight in the sum, and what becomes of its failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from rlflow.rewards.find import find_reward
from rlflow.rewards.found import Found
from rlflow.schema import Section


@dataclass(frozen=True, kw_only=True)
class Part(Section):
    what: ClassVar[str] = "reward"
    function: str | None = None
    """A file of rlflow.rewards.functions, or ``package.module:function``; by default the part's own name."""
    weight: float = 1.0
    """In the sum of the node's parts. 0: a metric alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The function's keyword-only parameters."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Of one call."""
    on_failure: Literal["stop", "exclude"] | float = "stop"
    """The run ends; or the response is left out, as if it had not been written; or it gets this number."""

    def find(self, name: str) -> Found:
        """Raises RecipeError, its path counted from the part."""
        return find_reward(self.function or name, self.options, self.timeout_s)
