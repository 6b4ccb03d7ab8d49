"""Writing responses in turns with an environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from rlflow.batch import Conversations, Prompts
from rlflow.engines.base import Generates
from rlflow.environments.turn import Turns
from rlflow.errors import RecipeError
from rlflow.nodes.exchange import Exchange
from rlflow.nodes.generate import Generate
from rlflow.rewards.pool.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Converse(Generate, kind="converse", unit="sample"):
    """``group_size`` conversations about each prompt. The model writes a turn, the environment answers, and so on: one
    response, of which the model's tokens alone are trained on.

    All conversations take their turns together. One ends when the environment says so; where it would become longer
    than ``max_tokens``, has ``max_turns``, or has a turn that is cut at ``turn_tokens``, it is cut.
    """

    environment: str
    """Of rlflow.environments.classes, or ``package.module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's fields."""
    max_turns: Annotated[int, Ge(1)]
    """Of the model."""
    turn_tokens: Annotated[int, Ge(1)]
    """Of one turn of the model. ``max_tokens`` is for the whole response, the environment's tokens included."""
    stop: tuple[str, ...] = ()
    """A turn ends with any of these, each a single token, as with the model's own end token."""
    frame: str = "{}"
    """What stands around what the environment says, in the place of the braces: where a chat template has several
    sides, the marks between them."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Of one call of the environment."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """Where the environment fails the run ends, or the response is left out, as if it had not been written."""

    def check(self, connected: frozenset[str]) -> None:
        self.turns.find(self.environment)
        if self.overcommit:
            raise RecipeError("overcommit", "conversations are not broken off between two steps", fix="overcommit: 0")
        if self.turn_tokens > self.max_tokens:
            fact = f"{self.turn_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("turn_tokens", fact, fix="a part of max_tokens")
        if self.frame.count("{}") != 1:
            raise RecipeError("frame", f"{self.frame!r} needs one '{{}}'", fix="frame: '{}'")

    @property
    def turns(self) -> Turns:
        return Turns(self.environment, self.options, self.timeout_s)

    def try_out(self) -> None:
        """Raises EngineError when the environment cannot run on this host."""
        Pool({self.environment: self.turns}).stop()

    def run(self, engine: Generates, exchange: Exchange, prompts: Prompts) -> Conversations:  # type: ignore[override]
        stop_ids = exchange.begin()
        sampling = replace(self.sampling, max_tokens=self.turn_tokens, stop_ids=stop_ids)
        asked: Prompts | None = prompts
        while asked is not None:
            asked = exchange.answered(engine.generate(asked, sampling))
            sampling = replace(sampling, group_size=1)
        return exchange.conversations()
