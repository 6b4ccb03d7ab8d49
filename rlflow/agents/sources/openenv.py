"""Environments that a server of OpenEnv runs: ``environment: openenv:http://host:8000``.

Its package is not needed: the protocol is JSON over a WebSocket, one for each episode.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.agents.base import Agent, Client, Message, ModelService, Outcome
from rlflow.errors import RecipeError
from rlflow.rewards.base import Row
from rlflow.schema import parse

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse

# The seconds before a server that has no free place is asked again.
_PAUSE_S = 0.5
# Servers check that a seed is no larger.
_SEEDS = 2**31


class OpenEnvError(RuntimeError):
    """A server's message about a request that it did not carry out."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


@dataclass
class OpenEnvAgent(Agent):
    """A chat about the row's ``prompt``, in which each reply is an action and each observation the user's answer.

    The row may have a ``seed`` and ``reset``, a mapping of further arguments for the reset.
    """

    action_field: str = ""
    """The field of an action that gets the text of a reply. By default it is the only one that the server requires, or
    a reply is a JSON object with all fields."""
    observation_field: str = ""
    """The field of an observation that the model reads. By default it reads the whole one as JSON."""

    def __post_init__(self) -> None:
        self.url = ""

    async def open(self, service: ModelService) -> None:
        """Read which fields an action has."""
        import aiohttp

        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        if not self.action_field:
            async with self._http.get(f"{self.url}/schema", raise_for_status=True) as response:
                required = (await response.json())["action"].get("required", [])
            self.action_field = required[0] if len(required) == 1 else ""

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def run(self, client: Client, row: Row) -> Outcome:
        """Run one episode. Each reply gets the reward of its step."""
        seed = int(row.get("seed", client.seed)) % _SEEDS
        socket, result = await self._reset({"seed": seed, **row.get("reset", {})})
        async with socket:
            prompt = row["prompt"]
            first = self._text(result["observation"])
            messages: list[Message] = [*prompt] if not isinstance(prompt, str) else []
            messages += [{"role": "user", "content": f"{prompt}\n\n{first}" if isinstance(prompt, str) else first}]
            while not result["done"]:
                reply = await client.chat(messages)
                messages.append(reply.message)
                try:
                    result = await _ask(socket, "step", self._action(reply.text))
                except OpenEnvError as error:
                    if error.code not in ("VALIDATION_ERROR", "INVALID_JSON"):
                        raise
                    messages.append({"role": "user", "content": f"Error: {error}"})
                else:
                    client.give_reward(float(result["reward"] or 0.0))
                    messages.append({"role": "user", "content": self._text(result["observation"])})
            await socket.send_json({"type": "close"})
        return Outcome()

    async def _reset(self, arguments: Mapping[str, Any]) -> "tuple[ClientWebSocketResponse, dict[str, Any]]":
        """Open a session, as soon as the server has a place for one, and return it with its first result."""
        while True:
            socket = await self._http.ws_connect(f"{self.url.replace('http', 'ws', 1)}/ws", max_msg_size=0)
            try:
                return socket, await _ask(socket, "reset", arguments)
            except BaseException as error:
                await socket.close()
                if not (isinstance(error, OpenEnvError) and error.code == "CAPACITY_REACHED"):
                    raise
            await asyncio.sleep(_PAUSE_S)

    def _action(self, text: str) -> Mapping[str, Any]:
        """Return the action of a reply. One that is no JSON object becomes an action that the server refuses."""
        if self.action_field:
            return {self.action_field: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        return action if isinstance(action, dict) else {"text": text}

    def _text(self, observation: Mapping[str, Any]) -> str:
        content = observation[self.observation_field] if self.observation_field else observation
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


async def _ask(socket: "ClientWebSocketResponse", kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request and return its result. Raises OpenEnvError."""
    await socket.send_json({"type": kind, "data": data})
    message = await socket.receive()
    if not isinstance(message.data, str):
        raise RuntimeError("the server of the environment has closed the connection")
    answer = json.loads(message.data)
    if answer["type"] == "error":
        raise OpenEnvError(answer["data"].get("message", "error"), answer["data"].get("code", "UNKNOWN"))
    result: dict[str, Any] = answer["data"]
    return result


def load(target: str, options: Mapping[str, Any]) -> OpenEnvAgent:
    """Create the agent of a server's environment. Raises RecipeError."""
    if not target.startswith(("http://", "https://")):
        raise RecipeError("environment", f"expected an address, got '{target}'", fix="write openenv:http://HOST:PORT")
    agent = parse(OpenEnvAgent, options, "options")
    agent.url = target.rstrip("/")
    return agent
