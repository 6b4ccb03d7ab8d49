"""Environments of an OpenEnv server, which a small server with the same protocol stands for."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from rlflow.agents.base import Outcome
from rlflow.agents.load import load_agent
from rlflow.agents.sources.openenv import OpenEnvError
from rlflow.errors import RecipeError
from tests.unit.agents.scripted import SERVICE, ScriptedClient


class Server:
    """A server with one place, whose environment wants the number that it was reset with."""

    def __init__(self, fields: list[str]) -> None:
        self.fields = fields
        self.requests: list[tuple[str, Any]] = []
        self.is_taken = False
        self.num_refused = 0

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/schema", self.schema)
        app.router.add_get("/ws", self.session)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": {"required": self.fields}, "observation": {}, "state": {}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.is_taken:
            self.num_refused += 1
            await socket.send_json(self.error("no place", "CAPACITY_REACHED"))
            return socket
        self.is_taken = True
        secret = 0
        async for message in socket:
            assert message.type == WSMsgType.TEXT
            request_data = json.loads(message.data)
            kind, data = request_data["type"], request_data.get("data", {})
            self.requests.append((kind, data))
            if kind == "close":
                break
            if kind == "reset":
                secret = data["secret"]
                await socket.send_json(self.result({"text": "which number?", "seed": data["seed"]}))
            else:
                await socket.send_json(self.step(data, secret))
        self.is_taken = False
        return socket

    def step(self, action: Mapping[str, Any], secret: int) -> Mapping[str, Any]:
        if action.keys() != set(self.fields):
            return self.error("fields are missing", "VALIDATION_ERROR")
        if action["guess"] == "crash":
            return self.error("it crashed", "EXECUTION_ERROR")
        is_right = int(action["guess"]) == secret
        return self.result({"text": "yes" if is_right else "no"}, 1.0 if is_right else -0.1, is_right)

    def result(self, observation: Any, reward: float | None = None, done: bool = False) -> Mapping[str, Any]:
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    def error(self, message: str, code: str) -> Mapping[str, Any]:
        return {"type": "error", "data": {"message": message, "code": code}}


def run(server: Server, *clients: ScriptedClient, **options: Any) -> list[Any]:
    """Run one episode for each client, all at the same time."""

    async def episodes() -> list[Any]:
        agent = load_agent(f"openenv:{await server.start()}/", options)
        await agent.open(SERVICE)
        row = {"prompt": "Guess.", "reset": {"secret": 7}}
        try:
            return await asyncio.gather(*(agent.run(client, row) for client in clients), return_exceptions=True)
        finally:
            await agent.close()
            await server.runner.cleanup()

    return asyncio.run(episodes())


def contents(client: ScriptedClient) -> list[str]:
    return [message["content"] for message in client.prompts[-1] if message["role"] == "user"]


def test_replies_are_actions_and_each_has_its_reward() -> None:
    server, client = Server(["guess"]), ScriptedClient("3", "7", seed=2**40 + 5)
    assert run(server, client, observation_field="text") == [Outcome()]
    assert client.rewards == [-0.1, 1.0]
    assert contents(client) == ["Guess.\n\nwhich number?", "no"]
    assert server.requests == [
        ("reset", {"seed": 5, "secret": 7}),
        ("step", {"guess": "3"}),
        ("step", {"guess": "7"}),
        ("close", {}),
    ]


def test_an_action_of_several_fields_is_json() -> None:
    server, client = Server(["guess", "why"]), ScriptedClient("7!", '{"guess": "7", "why": "luck"}')
    assert run(server, client) == [Outcome()]
    assert contents(client) == [
        'Guess.\n\n{"text": "which number?", "seed": 0}',
        "Error: fields are missing (VALIDATION_ERROR)",
    ]
    assert client.rewards == [1.0]


def test_an_environment_that_fails_is_no_outcome() -> None:
    [error] = run(Server(["guess"]), ScriptedClient("crash"))
    assert isinstance(error, OpenEnvError)
    assert str(error) == "it crashed (EXECUTION_ERROR)"


def test_an_episode_waits_for_a_free_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.agents.sources.openenv._PAUSE_S", 0.01)
    server = Server(["guess"])
    assert run(server, *(ScriptedClient("7", pauses=True) for _ in range(3))) == [Outcome()] * 3
    assert server.num_refused > 0


def test_the_address_is_checked() -> None:
    with pytest.raises(RecipeError, match="environment: expected an address, got 'localhost:8000'"):
        load_agent("openenv:localhost:8000", {})
