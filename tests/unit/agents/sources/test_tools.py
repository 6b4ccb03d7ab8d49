"""Chats with tools: what the model reads of them, and what it reads when a call fails."""

import json
import sys
from typing import Any

import pytest

from rlflow.agents.base import Outcome
from rlflow.agents.load import load_agent
from rlflow.agents.toolbox import ServerLostError
from rlflow.errors import RecipeError
from tests.unit.agents.scripted import ScriptedClient, calls, play

TOOLS = "tests.unit.agents.sources.example_tools"
FUNCTIONS = [f"{TOOLS}:add", f"{TOOLS}:weather"]
SERVER = {"command": [sys.executable, "-m", TOOLS]}


def run(client: ScriptedClient, prompt: Any = "2+3?", **options: Any) -> Outcome:
    outcome = play(load_agent("tools", options), client, {"prompt": prompt})
    assert isinstance(outcome, Outcome)
    return outcome


def results(client: ScriptedClient) -> list[str]:
    return [message["content"] for message in client.prompts[-1] if message["role"] == "tool"]


def test_tools_are_called_until_the_model_answers() -> None:
    client = ScriptedClient(
        calls(("add", {"a": 2, "b": "3"}), ("weather", {"city": "Rome"})), calls(("add", {"a": 1})), "5"
    )
    outcome = run(client, functions=FUNCTIONS, system="Be brief.")
    assert results(client) == ["5", '{"sky": "blue", "city": "Rome"}', "2"]
    roles = [message["role"] for message in client.prompts[-1]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [message["tool_call_id"] for message in client.prompts[1][-2:]] == ["call-0", "call-1"]
    assert outcome.finished
    assert outcome.reward == 0
    assert outcome.metrics["tool_calls"] == 3
    assert outcome.metrics["tool_errors"] == 0


def test_the_model_sees_types_and_docstrings() -> None:
    client = ScriptedClient("5")
    run(client, [{"role": "user", "content": "2+3?"}], functions=FUNCTIONS)
    assert client.prompts == [[{"role": "user", "content": "2+3?"}]]
    assert client.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "default": 1, "description": "the second number"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("subtract", {}, "Error: no tool 'subtract'. There are: add, weather, hang"),
        ("add", "{", "Error: the arguments are no JSON"),
        ("add", "[1, 2]", "Error: the arguments are not a JSON object"),
        ("add", {"a": "two"}, "Error: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "Error: c: Unexpected keyword argument"),
        ("weather", {"city": "Atlantis"}, "Error: ValueError: it is under water"),
        ("hang", {}, "Error: the tool took longer than 0.05 s"),
    ],
)
def test_a_failed_call_is_text_for_the_model(name: str, arguments: Any, message: str) -> None:
    client = ScriptedClient(calls((name, arguments)), "so be it")
    outcome = run(client, functions=[*FUNCTIONS, f"{TOOLS}:hang"], tool_timeout_s=0.05)
    assert results(client)[0].startswith(message)
    assert outcome.metrics["tool_errors"] == 1


def test_a_limit_ends_the_chat_with_its_metrics() -> None:
    outcome = run(ScriptedClient(calls(("add", {"a": 1}))), functions=FUNCTIONS)
    assert not outcome.finished
    assert outcome.metrics["tool_calls"] == 1


@pytest.mark.slow
def test_servers_offer_tools_and_see_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    tried = [("add", {"a": 2, "b": 3}), ("add", {"a": "x"}), ("variable", {"name": "SOME_API_KEY"}), ("nothing", {})]
    client = ScriptedClient(calls(*tried, ("weather", {"city": "Rome"})), "5")
    outcome = run(client, functions=FUNCTIONS[1:], servers={"sums": SERVER})
    right, wrong_type, secret, unknown, function = results(client)
    assert right == "5"
    assert "valid integer" in wrong_type
    assert "KeyError" in secret or "Error executing tool" in secret
    assert "secret" not in secret
    assert unknown.startswith("Error: no tool 'nothing'. There are: weather, add, variable, end")
    assert json.loads(function) == {"sky": "blue", "city": "Rome"}
    assert outcome.metrics["tool_errors"] == 3
    assert client.tools[1]["function"]["parameters"]["required"] == ["a"]


@pytest.mark.slow
def test_a_server_that_has_ended_is_no_fault_of_the_model() -> None:
    client = ScriptedClient(calls(("end", {})), "so be it")
    with pytest.raises(ServerLostError, match="the MCP server with the tool 'end' has ended"):
        run(client, servers={"sums": SERVER})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"options: no tools"),
        ({"functions": [f"{TOOLS}:ad"]}, r"options\.functions\.0: .* has no 'ad'"),
        ({"functions": [f"{TOOLS}:star"]}, r"options\.functions\.0: .* is no function whose"),
        ({"functions": [f"{TOOLS}:LIMIT"]}, r"options\.functions\.0: .* is no function whose"),
        ({"functions": ["os:system"]}, r"options\.functions\.0: .* belongs to Python"),
        ({"servers": {"sums": {}}}, r"options\.servers\.sums: expected one of command and url"),
        ({"timeout": 1}, r"options\.timeout: unknown key"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_agent("tools", options)
