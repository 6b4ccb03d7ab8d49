"""Writing responses.

Writing responses in turns with an environment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Self

from annotated_types import Ge, Gt, Le, Lt

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.engines.base import Generates, Sampling
from rlflow.errors import RecipeError
from rlflow.nodes.base import Node, Setting
from rlflow.nodes.environment_session import Exchange, TurnTaking
from rlflow.rewards.pool import ProcessPool
from rlflow.schema import Count


@dataclass(frozen=True, kw_only=True)
class Generate(Node, kind="generate", unit="sample"):
    """``group_size`` responses to each prompt."""

    group_size: Count = 8
    max_tokens: Count
    """Of a response; one that reaches it is cut."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    overcommit: Annotated[float, Ge(0), Lt(1)] = 0.0
    """More prompts are begun than a step trains on, by this share of ``data.batch_size``, and a step's generation ends
    when as many groups are whole as it trains on. What is written of the others goes on in the next step.

    Biased: short responses are trained on earlier than long ones, and the tokens of one response may be of several
    versions of the policy; ``logprobs`` are those of the version that wrote each, and ``sampler_difference`` holds how
    far the policy has moved since. Over the whole run every prompt is trained on once, as without it.
    """

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens, group_size=self.group_size, temperature=self.temperature, top_p=self.top_p
        )

    def begun_ahead(self, batch_size: int) -> int:
        """Prompts that are begun before the step that they would be trained in: ``overcommit``, rounded down."""
        # 0.29 x 100 is 28.999999999999996.
        return int(self.overcommit * batch_size + 1e-9)

    def greedy(self) -> Self:
        """One response to each prompt, of the likeliest tokens: to evaluate."""
        return replace(self, temperature=0.0, group_size=1, overcommit=0.0)

    def cautions(self, setting: Setting) -> Iterator[str]:
        if self.overcommit:
            yield (
                "overcommit: short responses are trained on before long ones, which is biased, and its time is that "
                "without it"
            )

    def run(self, engine: Generates, prompts: Prompts) -> Rollouts:
        return engine.generate(prompts, self.sampling)


@dataclass(frozen=True, kw_only=True)
class Converse(TurnTaking, Generate, kind="converse", unit="sample"):
    """``group_size`` conversations about each prompt. The model writes a turn, the environment answers, and so on: one
    response, of which the model's tokens alone are trained on.

    All conversations take their turns together. One ends when the environment says so; where it would become longer
    than ``max_tokens``, has ``max_turns``, or has a turn that is cut at ``turn_tokens``, it is cut.
    """

    def check(self, connected: frozenset[str]) -> None:
        self.turns.load(self.environment)
        if self.overcommit:
            raise RecipeError("overcommit", "conversations are not broken off between two steps", fix="overcommit: 0")
        if self.turn_tokens > self.max_tokens:
            fact = f"{self.turn_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("turn_tokens", fact, fix="a part of max_tokens")
        if self.frame.count("{}") != 1:
            raise RecipeError("frame", f"{self.frame!r} needs one '{{}}'", fix="frame: '{}'")

    def try_out(self) -> None:
        """Raises EngineError when the environment cannot run on this host."""
        ProcessPool({self.environment: self.turns}).stop()

    def run(self, engine: Generates, exchange: Exchange, prompts: Prompts) -> Conversations:  # type: ignore[override]
        stop_ids = exchange.begin()
        sampling = replace(self.sampling, max_tokens=self.turn_tokens, stop_ids=stop_ids)
        asked: Prompts | None = prompts
        while asked is not None:
            asked = exchange.answered(engine.generate(asked, sampling))
            sampling = replace(sampling, group_size=1)
        return exchange.conversations()
