"""Chats in which the model may call tools: ``environment: tools``."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from rlflow.agents.base import Agent, Client, LimitReachedError, Message, ModelService, Outcome
from rlflow.agents.toolbox import Tool, Toolbox, ToolServer, function_tool, no_calls, server_tools
from rlflow.errors import RecipeError
from rlflow.extras import check_extra
from rlflow.rewards.base import Row
from rlflow.schema import Seconds, Text, parse


@dataclass
class ToolAgent(Agent):
    """A chat that begins with the row's ``prompt``, a text or messages, and ends with a reply that calls no tool."""

    gives_rewards: ClassVar[bool] = False

    functions: tuple[Text, ...] = ()
    """Python functions as ``package.module:function``. The model reads their names, type hints and docstrings."""
    servers: Mapping[str, ToolServer] = field(default_factory=dict)
    """MCP servers, whose tools are all offered. Each worker process starts its own."""
    system: str = ""
    """A system message before the prompt."""
    tool_timeout_s: Seconds = 30.0
    """The time limit of a tool call, after which the model reads that it took too long. It must be less than the node's
    ``timeout_s``, which ends the attempt."""

    async def open(self, service: ModelService) -> None:
        """Load the functions, and connect to the servers."""
        self._connections = AsyncExitStack()
        tools = {tool.name: tool for tool in _function_tools(self.functions)}
        for name, server in self.servers.items():
            for tool in await server_tools(server, self._connections):
                if tool.name in tools:
                    fact = f"a second tool has the name '{tool.name}'"
                    raise RecipeError(f"options.servers.{name}", fact, fix="leave one of them out")
                tools[tool.name] = tool
        self._toolbox = Toolbox(tools, self.tool_timeout_s)

    async def close(self) -> None:
        """Disconnect from the servers, and end those that were started."""
        await self._connections.aclose()

    async def run(self, client: Client, row: Row) -> Outcome:
        """Run one chat."""
        prompt = row["prompt"]
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        metrics = no_calls()
        try:
            reply = await self._toolbox.chat(partial(client.chat, tools=self._toolbox.schemas), messages, metrics)
        except LimitReachedError:
            return Outcome(finished=False, metrics=metrics)
        return Outcome(finished=reply.finished, metrics=metrics)


def load(target: str, options: Mapping[str, Any]) -> ToolAgent:
    """Create the agent. Raises RecipeError."""
    agent = parse(ToolAgent, options, "options")
    if not (agent.functions or agent.servers):
        raise RecipeError("options", "no tools", fix="add functions or servers")
    _function_tools(agent.functions)
    if agent.servers:
        check_extra("mcp", "options.servers", "a server of tools")
    for name, server in agent.servers.items():
        if bool(server.command) == bool(server.url):
            raise RecipeError(f"options.servers.{name}", "expected one of command and url", fix="set one of them")
    return agent


def _function_tools(names: tuple[str, ...]) -> list[Tool]:
    return [function_tool(name, f"options.functions.{index}") for index, name in enumerate(names)]
