"""Episodes of agents, on any engine that generates."""

from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.gathering_engine import GatheringEngine
from rlflow.agents.options import AgentOptions
from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Generates, Sampling
from rlflow.engines.serving.sessions import SessionEngine

# The engines over those of this process that have no sessions, which live as long as these.
_GATHERING: "WeakKeyDictionary[Any, SessionEngine]" = WeakKeyDictionary()


@dataclass(frozen=True)
class AgentTurns:
    """Turns of a model that programs ask for (``engines.base.Turns``)."""

    options: AgentOptions
    limit_includes_prompt: ClassVar[bool] = True

    def session_engine(self, engine: Any) -> AgentEngine:
        """Return an engine of episodes over a session engine."""
        return AgentEngine(engine, self.options)

    def generate(self, engine: Generates, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return episodes whose calls the engine generates, many in a batch."""
        gathering = _GATHERING.get(engine)
        if gathering is None:
            gathering = _GATHERING[engine] = GatheringEngine(engine)
        return gathering.generate(prompts, sampling)
