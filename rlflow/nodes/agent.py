"""Generation of responses by programs that call the model."""

from dataclasses import dataclass, fields, replace

from rlflow.agents.load import load_agent
from rlflow.agents.options import AgentOptions
from rlflow.agents.turns import AgentTurns
from rlflow.agents.worker import AgentSpec
from rlflow.batch import Conversations, Prompts
from rlflow.engines.base import Generates, Sampling
from rlflow.errors import RecipeError
from rlflow.extras import check_extra
from rlflow.nodes.generate import Generate


@dataclass(frozen=True, kw_only=True)
class AgentEpisodes(AgentOptions, Generate, kind="agent", unit="sample"):
    """Let programs call the model, in ``group_size`` episodes about each prompt.

    An episode is one response. The program decides what the model reads, and only what the model sampled is trained on.
    A call that does not continue an earlier one begins another *segment* of the response. An episode is cut when it
    asks for more than ``max_calls``, or for a prompt without room in ``max_tokens``.
    """

    @property
    def sampling(self) -> Sampling:
        """Return what the engine is asked for."""
        options = AgentOptions(**{field.name: getattr(self, field.name) for field in fields(AgentOptions)})
        return replace(super().sampling, turns=AgentTurns(options))

    @property
    def can_stream(self) -> bool:
        """Return whether consumers may start with single episodes, as with other responses."""
        return type(self).run is AgentEpisodes.run

    @property
    def num_turns(self) -> int:
        """Return the largest number of calls of the model."""
        return self.max_calls

    @property
    def turn_cpu_s(self) -> float:
        """Return the CPU time that plans count for each call: the endpoint's and the agent's."""
        return load_agent(self.environment, self.options).call_cpu_s

    @property
    def gives_rewards(self) -> bool:
        """Return whether the agent gives rewards."""
        return load_agent(self.environment, self.options).gives_rewards

    def check(self, connected: frozenset[str]) -> None:
        super().check(connected)
        for library in ("aiohttp", "renderers"):
            check_extra(library, "node", "an agent")
        load_agent(self.environment, self.options)
        if self.turn_tokens >= self.max_tokens:
            fact = f"{self.turn_tokens} is not less than max_tokens, which is {self.max_tokens} with the prompt"
            raise RecipeError("turn_tokens", fact, fix="use a smaller number, or a larger max_tokens")

    def check_host(self) -> None:
        AgentSpec(self.environment, self.options, self.timeout_s).load(self.environment)

    def run(self, engine: Generates, prompts: Prompts) -> Conversations:
        episodes = engine.generate(prompts, self.sampling)
        assert isinstance(episodes, Conversations)
        return episodes
