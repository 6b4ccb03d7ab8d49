"""Tools that a model may call: Python functions, and those of MCP servers."""

import asyncio
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from rlflow.agents.base import ChatReply, Message, WorkerBrokenError
from rlflow.errors import RecipeError, first_line
from rlflow.plugins import load_object
from rlflow.schema import Section, Text

# The variables that a server's process inherits beside those that mcp passes on, which hold no keys either.
_INHERITED = ("LANG", "PYTHONPATH")


@dataclass(frozen=True, kw_only=True)
class ToolServer(Section):
    """An MCP server: a program to start, or an address."""

    command: tuple[Text, ...] = ()
    """The program and its arguments; ``python`` is the one that runs rlflow. It speaks MCP over its standard input and
    output."""
    url: str = ""
    """The address of a server that runs already."""


@dataclass(frozen=True)
class Tool:
    """A tool as the model sees it, and what calls it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Returns the text that the model reads. May raise anything."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Return the tool in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Toolbox:
    """The tools of some chats, with the time limit of a call."""

    tools: Mapping[str, Tool]
    timeout_s: float

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the tools in OpenAI's form."""
        return [tool.schema for tool in self.tools.values()]

    async def chat(
        self, ask: Callable[[list[Message]], Awaitable[ChatReply]], messages: list[Message], metrics: dict[str, float]
    ) -> ChatReply:
        """Ask the model, and answer its calls, until a reply calls no tool. Return that, and count in ``metrics``."""
        while True:
            reply = await ask(messages)
            messages.append(reply.message)
            if not (calls := reply.message.get("tool_calls")):
                return reply
            messages += [await self._answer(call, metrics) for call in calls]

    async def _answer(self, call: Mapping[str, Any], metrics: dict[str, float]) -> Message:
        """Call a tool, and return the message with its result or with what went wrong."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
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
        tool = self.tools.get(function["name"])
        if tool is None:
            raise ToolError(f"no tool '{function['name']}'. There are: {', '.join(self.tools)}")
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
            return f"the tool took longer than {self.timeout_s:g} s"
        if isinstance(error, ValidationError):
            return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        return first_line(error)


def no_calls() -> dict[str, float]:
    """Return the metrics of a chat that has called no tool yet."""
    return {"tool_calls": 0.0, "tool_errors": 0.0, "tool_s": 0.0}


class ToolError(Exception):
    """A message for the model about a call that failed."""


class ServerLostError(WorkerBrokenError):
    """The connection to an MCP server is lost, which is no fault of the model."""


class _Untitled(GenerateJsonSchema):
    """Leaves out titles, which would only repeat names and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def function_tool(name: str, path: str) -> Tool:
    """Return the tool that calls ``package.module:function``. Raises RecipeError at ``path``."""
    function = load_object(name, path)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except (PydanticUserError, NameError, TypeError):
        parameters = {}
    if not inspect.isroutine(function) or parameters.get("type") != "object":
        fact = f"'{name}' is no function whose arguments have names and types that JSON can hold"
        raise RecipeError(path, fact, fix="write such a function")

    async def call(arguments: dict[str, Any]) -> str:
        # The adapter checks and converts the arguments, and calls the function.
        called = partial(adapter.validate_python, arguments)
        result = await called() if inspect.iscoroutinefunction(function) else await _in_thread(called)
        return result if isinstance(result, str) else json.dumps(result, default=str)

    return Tool(function.__name__, inspect.getdoc(function) or "", parameters, call)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, because one that hangs never gives its thread back."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await asyncio.wrap_future(future)


async def server_tools(server: ToolServer, connections: AsyncExitStack, prefix: str = "") -> list[Tool]:
    """Connect to a server until ``connections`` are closed, by the same asyncio task, and return its tools.

    ``prefix`` begins the names that the model sees.
    """
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if server.command:
        program, *arguments = server.command
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        program = sys.executable if program == "python" else program
        parameters = StdioServerParameters(command=program, args=arguments, env=variables)
        client = await connections.enter_async_context(Client(stdio_client(parameters)))
    else:
        client = await connections.enter_async_context(Client(server.url))
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            Tool(
                f"{prefix}{tool.name}",
                tool.description or "",
                tool.input_schema,
                partial(_call_server, client, tool.name),
            )
            for tool in page.tools
        ]
        if (cursor := page.next_cursor) is None:
            return tools


async def _call_server(client: Any, name: str, arguments: dict[str, Any]) -> str:
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        result = await client.call_tool(name, arguments)
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise ServerLostError(f"the MCP server with the tool '{name}' has ended") from None
        raise ToolError(error.message) from None
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    if result.is_error:
        raise ToolError(text)
    return text
