"""Writing responses."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Generates, Sampling
from rlflow.nodes.base import Node


@dataclass(frozen=True, kw_only=True)
class Generate(Node, kind="generate", unit="sample"):
    """``group_size`` responses to each prompt."""

    group_size: Annotated[int, Ge(1)] = 8
    max_tokens: Annotated[int, Ge(1)]
    """Of a response; one that reaches it is cut."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0

    def run(self, engine: Generates, prompts: Prompts) -> Rollouts:
        sampling = Sampling(
            max_tokens=self.max_tokens, group_size=self.group_size, temperature=self.temperature, top_p=self.top_p
        )
        return engine.generate(prompts, sampling)
