"""Tasksets of the library verifiers: ``environment: verifiers:my_taskset``."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from rlflow.agents import verifiers_library
from rlflow.agents.base import Agent, ChatReply, Client, LimitReachedError, Message, ModelService, Outcome
from rlflow.agents.toolbox import Toolbox, ToolServer, no_calls, server_tools
from rlflow.agents.verifiers_library import CHAT
from rlflow.errors import RecipeError
from rlflow.extras import check_extra
from rlflow.rewards.base import Row
from rlflow.schema import Seconds, Text, parse

# Messages with which a call is refused: by the task's own conditions, by the endpoint, and by verifiers' renderers.
_ENDS = ("rollout stopped", "rlflow_limit_reached", "context_length_exceeded", "exceeds maximum context length")


@dataclass
class VerifiersAgent(Agent):
    """The only agent of a taskset, with a chat in this process as its harness, in the place of verifiers' shell."""

    call_cpu_s: ClassVar[float] = 10e-3

    taskset: Mapping[str, Any] = field(default_factory=dict)
    """The configuration of the taskset, the same as in ``data.options``."""
    harness: Text = "chat"
    """``chat``, which offers the MCP tools of the taskset, or the ID of a harness that executes no code."""
    renderer: Mapping[str, Any] = field(default_factory=dict)
    """A renderer of verifiers that turns messages into tokens in this process, such as ``name: qwen3``. By default the
    endpoint does that, and also knows other chat templates."""
    tool_timeout_s: Seconds = 30.0
    """The time limit of a tool call in ``chat``, after which the model reads that it took too long."""

    def __post_init__(self) -> None:
        self.id = ""

    def prepare(self) -> None:
        """Import verifiers, which takes five seconds and 200 MB."""
        verifiers_library.prepare()

    async def open(self, service: ModelService) -> None:
        """Start what verifiers serves to all episodes. Raises RecipeError, and what verifiers raises."""
        import aiohttp

        self._names: dict[str, asyncio.Future[None]] = {}
        sys.modules[CHAT] = verifiers_library.chat_module(self._chat)
        harness = CHAT if self.harness == "chat" else self.harness
        self._environment = verifiers_library.load_environment(self.id, self.taskset, harness)
        self._context = verifiers_library.model_context(service, self.renderer)
        self._stack = AsyncExitStack()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._http = await self._stack.enter_async_context(session)
        await self._stack.enter_async_context(self._environment.serving())

    async def close(self) -> None:
        """End what ``open`` has started."""
        await self._stack.aclose()

    async def run(self, client: Client, row: Row) -> Outcome:
        """Run one episode about a task."""
        taskset = self._environment.taskset
        kind = type(taskset).task_type()
        [slot] = self._environment.slots(kind(kind.data_type().model_validate(row["task"]), taskset.config.task))

        def set_name(trace: Any) -> None:
            self._names[trace.id] = asyncio.ensure_future(client.set_name(trace.id))

        try:
            episode = await self._environment.run_slot(slot, self._context, on_trace=set_name)
        finally:
            for trace in slot.traces:
                self._names.pop(trace.id).cancel()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        [trace] = episode.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        was_refused = bool(trace.calls) and trace.calls[-1].error is not None
        finished = not (trace.is_truncated or trace.is_timeout or was_refused)
        return Outcome(trace.reward, finished=finished, metrics=rewards | metrics | trace.info.get(CHAT, {}))

    async def _chat(
        self, messages: list[Message], trace: Any, endpoint: str, key: str, servers: Mapping[str, str]
    ) -> None:
        """Hold a chat, until a reply calls no tool, or to a limit."""
        await self._names[trace.id]
        tools = {}
        async with AsyncExitStack() as connections:
            for name, url in servers.items():
                for tool in await server_tools(ToolServer(url=url), connections, f"{name}_" if name else ""):
                    tools[tool.name] = tool
            toolbox = Toolbox(tools, self.tool_timeout_s)
            body = {"model": self._context.model, "tools": toolbox.schemas or None}
            ask = partial(self._ask, f"{endpoint}/chat/completions", key, body)
            with suppress(LimitReachedError):
                await toolbox.chat(ask, messages, trace.info.setdefault(CHAT, no_calls()))

    async def _ask(self, url: str, key: str, body: Mapping[str, Any], messages: list[Message]) -> ChatReply:
        """Ask verifiers' own endpoint, which refuses calls at limits and at the task's own conditions."""
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post(url, json={**body, "messages": messages}, headers=headers) as response:
            text = await response.text()
        if response.status != 200:
            raise LimitReachedError if any(end in text for end in _ENDS) else RuntimeError(text)
        reply = json.loads(text)
        return ChatReply(reply["id"], reply["choices"][0]["message"], finished=True)


def task_rows(name: str) -> Callable[..., list[dict[str, Any]]]:
    """Return the function that makes the rows of ``data.source: verifiers:TASKSET``. Raises RecipeError."""
    check_extra("verifiers", "data.source", "its taskset")
    return partial(_rows, name)


def _rows(name: str, taskset: Mapping[str, Any] | None = None, size: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each task, or for the first ``size``: the text of its prompt, and all that it is made of."""
    tasks = verifiers_library.load_taskset(name, taskset or {})
    if size is None and not tasks.bounded:
        raise ValueError("the taskset has no end, so it needs a size")
    chosen = [task.data for task in (tasks if size is None else tasks.take(size))]
    prompts = [data.prompt_text or data.name or str(data.idx) for data in chosen]
    contents = [data.model_dump(mode="json", exclude_defaults=True) for data in chosen]
    return [{"prompt": prompt, "task": content} for prompt, content in zip(prompts, contents, strict=True)]


def load(target: str, options: Mapping[str, Any]) -> VerifiersAgent:
    """Create the agent of a taskset. Raises RecipeError."""
    if not target:
        raise RecipeError("environment", "no taskset", fix="write verifiers:TASKSET")
    check_extra("verifiers", "environment", "its taskset")
    agent = parse(VerifiersAgent, options, "options")
    if agent.harness != "chat":
        verifiers_library.check_harness(agent.harness)
    agent.id = target
    return agent
