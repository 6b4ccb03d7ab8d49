"""Generation of responses: in one piece, or in turns with an environment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self

from annotated_types import Ge, Le

from rlflow.batch import MAX_ROWS, Conversations, Prompts, Rollouts
from rlflow.engines.base import Generates, Sampling
from rlflow.environments.base import load_environment
from rlflow.environments.conversations import EnvironmentTurns
from rlflow.environments.options import CHAT_FRAME, TurnOptions
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.alarms import NO_RESPONSE_ENDS
from rlflow.nodes.base import Headline, Node, NodeView
from rlflow.rewards.pool import ProcessPool
from rlflow.schema import Count, TopP

# vLLM raises a lower temperature to this one, or takes the likeliest tokens.
_LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class Generate(Node, kind="generate", unit="sample"):
    """Generate ``group_size`` responses to each prompt."""

    group_size: Count = 8
    """The number of responses to each prompt."""
    max_tokens: Count
    """The limit of a response; a response that reaches it is cut."""
    temperature: Annotated[float, Ge(0), Le(10)] = 1.0
    """0 takes the likeliest token; otherwise at least 0.01."""
    top_p: TopP = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this share."""

    headline = Headline("length_mean", ".1f", label="length")
    alarms = (NO_RESPONSE_ENDS,)

    @property
    def sampling(self) -> Sampling:
        """Return what the engine is asked for."""
        return Sampling(
            max_tokens=self.max_tokens, group_size=self.group_size, temperature=self.temperature, top_p=self.top_p
        )

    @property
    def can_stream(self) -> bool:
        """Return whether consumers may start with single responses, because the engine's output is the node's own."""
        return type(self).run is Generate.run

    @property
    def gives_rewards(self) -> bool:
        """Return whether the rows of the rollouts hold rewards that an environment gave."""
        return False

    def for_evaluation(self, num_responses: int, temperature: float | None, top_p: float | None) -> Self:
        """Return the node for evaluation: one response to each prompt of the likeliest tokens, or several samples.

        None stands for the node's own ``temperature`` or ``top_p``.
        """
        if num_responses == 1:
            return replace(self, temperature=0.0, group_size=1)
        return replace(
            self,
            group_size=num_responses,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
        )

    def check(self, connected: frozenset[str]) -> None:
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            fact = f"{self.temperature:g} is so low that engines take the likeliest token"
            raise RecipeError("temperature", fact, fix=f"use {_LEAST_TEMPERATURE:g} or more, or 0")

    def check_graph(self, view: NodeView) -> None:
        batch_size = view.recipe.data.batch_size
        if batch_size * self.group_size > MAX_ROWS:
            fact = f"{self.group_size} responses to each of {batch_size} prompts are more than {MAX_ROWS}"
            raise GraphError(f"{view.path}.group_size", fact, fix="smaller groups, or a smaller data.batch_size")

    def check_rows(self, rows: Sequence[Mapping[str, Any]], where: str) -> Iterable[str]:
        if self.sampling.turns is not None and any(row.get("images") for row in rows):
            fact = f"rows of {where} have images, which models read only in prompts without an environment or an agent"
            raise RecipeError("node", fact, fix="node: generate")
        return ()

    def run(self, engine: Generates, prompts: Prompts) -> Rollouts:
        return engine.generate(prompts, self.sampling)


@dataclass(frozen=True, kw_only=True)
class Converse(TurnOptions, Generate, kind="converse", unit="sample"):
    """Hold ``group_size`` conversations about each prompt, in turns of the model and an environment.

    A conversation is one response, and only the model's own tokens are trained on. A conversation finishes when the
    environment says so. It is cut when it has ``max_turns``, when a turn reaches ``turn_tokens``, or when the next turn
    might exceed ``max_tokens``.
    """

    @property
    def sampling(self) -> Sampling:
        """Return what the engine is asked for."""
        options = TurnOptions(**{field.name: getattr(self, field.name) for field in fields(TurnOptions)})
        return replace(super().sampling, turns=EnvironmentTurns(options))

    @property
    def can_stream(self) -> bool:
        """Return whether consumers may start with single conversations, as with other responses."""
        return type(self).run is Converse.run

    @property
    def num_turns(self) -> int:
        """Return the largest number of turns of the model."""
        return self.max_turns

    @property
    def gives_rewards(self) -> bool:
        """Return whether the environment gives rewards."""
        return load_environment(self.environment, self.options).gives_rewards

    def check(self, connected: frozenset[str]) -> None:
        super().check(connected)
        self.environment_spec.load(self.environment)
        fix = f"use a smaller number, or max_tokens={self.turn_tokens * self.max_turns}"
        if self.turn_tokens > self.max_tokens:
            fact = f"{self.turn_tokens} is more than max_tokens, which is {self.max_tokens}"
            raise RecipeError("turn_tokens", fact, fix=fix)
        if self.turn_tokens == self.max_tokens and self.max_turns > 1:
            fact = f"{self.turn_tokens} is all of max_tokens, so that no conversation has a second turn"
            raise RecipeError("turn_tokens", fact, fix=f"{fix}, or max_turns=1")
        if self.frame == CHAT_FRAME:
            if self.stop:
                fact = "a turn of a chat ends with the model's own end token, not with other texts"
                raise RecipeError("stop", fact, fix="leave stop out, or write the frame")
        elif self.frame.count("{}") != 1:
            fact = f"expected 'chat' or one '{{}}', got {self.frame!r}"
            raise RecipeError("frame", fact, fix="frame: '{}'")

    def check_host(self) -> None:
        ProcessPool({self.environment: self.environment_spec}).stop()

    def run(self, engine: Generates, prompts: Prompts) -> Conversations:
        conversations = engine.generate(prompts, self.sampling)
        assert isinstance(conversations, Conversations)
        return conversations
