"""Chats in which the model may call tools: ``environment: tools``."""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ValidationError

from rlflow.agents.base import Agent, Client, LimitReachedError, Message, ModelService, Outcome
from rlflow.agents.toolbox import ServerLostError, Tool, ToolError, ToolServer, function_tool, server_tools
from rlflow.errors import RecipeError, first_line
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
    tool_timeout_s: Seconds = 60.0
    """The time limit of a tool call, after which the model reads that it took too long."""

    async def open(self, service: ModelService) -> None:
        """Load the functions, and connect to the servers."""
        self._connections = AsyncExitStack()
        self._tools = {tool.name: tool for tool in _function_tools(self.functions)}
        for name, server in self.servers.items():
            for tool in await server_tools(server, self._connections):
                if tool.name in self._tools:
                    fact = f"a second tool has the name '{tool.name}'"
                    raise RecipeError(f"options.servers.{name}", fact, fix="leave one of them out")
                self._tools[tool.name] = tool

    async def close(self) -> None:
        """Disconnect from the servers, and end those that were started."""
        await self._connections.aclose()

    async def run(self, client: Client, row: Row) -> Outcome:
        """Run one chat."""
        prompt = row["prompt"]
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        schemas = [tool.schema for tool in self._tools.values()]
        metrics = {"tool_calls": 0.0, "tool_errors": 0.0, "tool_s": 0.0}
        try:
            while True:
                reply = await client.chat(messages, schemas)
                calls = reply.message.get("tool_calls") or ()
                if not calls:
                    return Outcome(finished=reply.finished, metrics=metrics)
                messages += [reply.message, *[await self._answer(call, metrics) for call in calls]]
        except LimitReachedError:
            return Outcome(finished=False, metrics=metrics)

    async def _answer(self, call: Mapping[str, Any], metrics: dict[str, float]) -> Message:
        """Call a tool, and return the message with its result or with what went wrong."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.tool_timeout_s):
                content = await self._result(call["function"])
        except ServerLostError:
            raise
        except Exception as error:  # a tool may raise anything, and the model reads it
            metrics["tool_errors"] += 1
            content = f"Error: {self._describe(error)}"
        metrics["tool_calls"] += 1
        metrics["tool_s"] += time.monotonic() - start
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    async def _result(self, function: Mapping[str, Any]) -> str:
        tool = self._tools.get(function["name"])
        if tool is None:
            raise ToolError(f"no tool '{function['name']}'. There are: {', '.join(self._tools)}")
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise ToolError(f"the arguments are no JSON ({error})") from None
        if not isinstance(arguments, dict):
            raise ToolError("the arguments are not a JSON object")
        return await tool.call(arguments)

    def _describe(self, error: Exception) -> str:
        if isinstance(error, ToolError):
            return str(error)
        if isinstance(error, TimeoutError):
            return f"the tool took longer than {self.tool_timeout_s:g} s"
        if isinstance(error, ValidationError):
            return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return first_line(error)


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
