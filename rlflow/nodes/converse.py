"""Writing responses in turns with an environment."""

from dataclasses import dataclass, replace

from rlflow.batch import Conversations, Prompts
from rlflow.engines.base import Generates
from rlflow.errors import RecipeError
from rlflow.nodes.exchange import Exchange
from rlflow.nodes.generate import Generate
from rlflow.nodes.turn_taking import TurnTaking
from rlflow.rewards.pool.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Converse(TurnTaking, Generate, kind="converse", unit="sample"):
    """``group_size`` conversations about each prompt. The model writes a turn, the environment answers, and so on: one
    response, of which the model's tokens alone are trained on.

    All conversations take their turns together. One ends when the environment says so; where it would become longer
    than ``max_tokens``, has ``max_turns``, or has a turn that is cut at ``turn_tokens``, it is cut.
    """

    def check(self, connected: frozenset[str]) -> None:
        self.turns.find(self.environment)
        if self.overcommit:
            raise RecipeError("overcommit", "conversations are not broken off between two steps", fix="overcommit: 0")
        if self.turn_tokens > self.max_tokens:
            fact = f"{self.turn_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("turn_tokens", fact, fix="a part of max_tokens")
        if self.frame.count("{}") != 1:
            raise RecipeError("frame", f"{self.frame!r} needs one '{{}}'", fix="frame: '{}'")

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
