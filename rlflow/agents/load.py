"""Loads the agent that a recipe names."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlflow.agents import sources
from rlflow.agents.base import Agent, Client, Outcome
from rlflow.errors import RecipeError
from rlflow.plugins import builtin_module, load_object
from rlflow.rewards.base import Row
from rlflow.schema import parse

# The sources that are named with a part of their own: ``verifiers:my_taskset``.
_WITH_TARGET = ("openenv", "textarena", "verifiers")
_PATH = "environment"


class FunctionAgent(Agent):
    """An agent of a single function, ``async def solve(client, row)``."""

    def __init__(self, solve: Callable[[Client, Row], Awaitable[Outcome | float]]) -> None:
        self._solve = solve

    async def run(self, client: Client, row: Row) -> Outcome | float:
        """Run one episode."""
        return await self._solve(client, row)


def load_agent(name: str, options: Mapping[str, Any]) -> Agent:
    """Create the agent that has these options, and is ready for ``open``.

    ``name`` is a file of rlflow.agents.sources, such as ``tools`` or ``verifiers:my_taskset``, or
    ``package.module:Object``, an Agent or a coroutine function. Raises RecipeError at the paths ``environment`` and
    ``options``.
    """
    source, colon, target = name.partition(":")
    if not colon or source in _WITH_TARGET:
        agent: Agent = builtin_module(sources, source, _PATH, "environment").load(target, options)
        return agent
    kind = load_object(name, _PATH)
    if inspect.iscoroutinefunction(kind):
        if options:
            raise RecipeError("options", f"the function '{name}' has no options", fix="derive a class from Agent")
        return FunctionAgent(kind)
    if not (isinstance(kind, type) and issubclass(kind, Agent)):
        fix = "derive it from rlflow.agents.base.Agent, or write async def solve(client, row)"
        raise RecipeError(_PATH, f"'{name}' is neither an Agent nor a coroutine function", fix=fix)
    if inspect.isabstract(kind):
        raise RecipeError(_PATH, f"'{name}' has no run", fix="see docs/agents.md")
    return parse(kind, options, "options")
