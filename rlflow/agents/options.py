"""The options of agents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from rlflow.schema import Count, Seconds, Section


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Section):
    """The options of episodes."""

    environment: str
    """``tools``, ``command``, ``verifiers:TASKSET``, ``textarena:GAME``, ``openenv:URL``, or ``package.module:NAME`` of
    an Agent or a coroutine."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template, as in ``data``."""
    max_calls: Count
    """The limit of the model's calls in an episode."""
    turn_tokens: Count
    """The limit of one reply of the model, in tokens."""
    max_tokens: Count
    """The limit of one segment in tokens, with its prompt."""
    processes: Count | None = None
    """The worker processes of agents beside each engine; by default one for each of the engine's CPUs."""
    timeout_s: Seconds = 60.0
    """The time limit of an episode between a reply of the model and the next call."""
    retries: Annotated[int, Ge(0), Le(100)] = 2
    """How often an episode that failed is tried again with a fresh environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """The result of an episode that fails for good: the run stops, or the response is excluded from training."""
