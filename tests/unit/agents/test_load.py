"""Agents that a recipe names."""

from dataclasses import dataclass
from typing import Any

import pytest

from rlflow.agents.base import Agent, Client, Outcome
from rlflow.agents.load import load_agent
from rlflow.errors import RecipeError
from rlflow.rewards.base import Row
from tests.unit.agents.scripted import ScriptedClient, play

HERE = "tests.unit.agents.test_load"


@dataclass
class Echo(Agent):
    weight: float = 1.0

    async def run(self, client: Client, row: Row) -> Outcome:
        reply = await client.chat([{"role": "user", "content": row["prompt"]}])
        return Outcome(self.weight * (reply.text == row["prompt"]))


class Unfinished(Agent):
    pass


async def solve(client: Client, row: Row) -> float:
    return 1.0 if (await client.chat([row["prompt"]])).text == "yes" else 0.0


def test_a_class_has_options_and_a_function_has_none() -> None:
    assert play(load_agent(f"{HERE}:Echo", {"weight": 2.0}), ScriptedClient("ha"), {"prompt": "ha"}) == Outcome(2.0)
    assert play(load_agent(f"{HERE}:solve", {}), ScriptedClient("yes"), {"prompt": "well?"}) == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tool", {}, r"environment: no environment 'tool'[\s\S]*Fix: did you mean 'tools'"),
        (f"{HERE}:Ehco", {}, r"environment: .* has no 'Ehco'"),
        (f"{HERE}:play", {}, r"environment: .* neither an Agent nor a coroutine function"),
        (f"{HERE}:Unfinished", {}, r"environment: .* has no run"),
        (f"{HERE}:Echo", {"wieght": 1.0}, r"options\.wieght: unknown key[\s\S]*Fix: did you mean 'weight'"),
        (f"{HERE}:solve", {"weight": 1.0}, r"options: the function .* has no options"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_agent(name, options)
