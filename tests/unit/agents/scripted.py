"""A model whose replies are written by a test."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from rlflow.agents.base import (
    Agent,
    ChatReply,
    Client,
    LimitReachedError,
    Message,
    ModelService,
    ModelSpec,
    Outcome,
    TokenReply,
)

SERVICE = ModelService("http://127.0.0.1:9", "key", ModelSpec("folder", "policy", 4096, 256))


class ScriptedClient(Client):
    """A client that answers with texts, tool calls, or what a function makes of the messages."""

    base_url = "http://127.0.0.1:9/v1"
    api_key = "token"
    model = "policy"

    def __init__(
        self,
        *replies: str | Mapping[str, Any] | Callable[[Sequence[Message]], str],
        seed: int = 0,
        pauses: bool = False,
    ) -> None:
        self.replies = list(replies)
        self.seed = seed
        self.pauses = pauses
        self.random = Random(seed)
        self.prompts: list[list[Message]] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.rewards: list[float] = []
        self.names: list[str] = []

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> ChatReply:
        """Return the next reply. Without one, a limit is reached."""
        self.prompts.append(list(messages))
        self.tools = tools
        if self.pauses:
            await asyncio.sleep(0)
        if not self.replies:
            raise LimitReachedError("max_calls")
        reply = self.replies.pop(0)
        if callable(reply):
            reply = reply(messages)
        if isinstance(reply, str):
            reply = {"content": reply}
        return ChatReply(f"reply-{len(self.prompts)}", {"role": "assistant", **reply}, finished=True)

    async def generate(self, ids: Sequence[int], *, max_tokens: int | None = None) -> TokenReply:
        """Refuse to generate from tokens."""
        raise NotImplementedError

    def give_reward(self, reward: float) -> None:
        """Keep the reward."""
        self.rewards.append(reward)

    async def set_name(self, name: str) -> None:
        """Keep the name."""
        self.names.append(name)


def calls(*named: tuple[str, Any]) -> Mapping[str, Any]:
    """Return a reply that calls tools, each with its arguments: a mapping, or a text as the model wrote it."""
    return {
        "content": None,
        "tool_calls": [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for number, (name, arguments) in enumerate(named)
        ],
    }


def play(agent: Agent, client: ScriptedClient, row: Mapping[str, Any]) -> Outcome | float:
    """Run one episode in a loop of its own, as a worker runs many in one loop."""

    async def episode() -> Outcome | float:
        await agent.open(SERVICE)
        try:
            return await agent.run(client, row)
        finally:
            await agent.close()

    return asyncio.run(episode())
