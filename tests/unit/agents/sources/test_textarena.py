"""Games of textarena: what the model reads, the reward, and that games at the same time share no random numbers."""

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from rlflow.agents.base import Message, Outcome
from rlflow.agents.load import load_agent
from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from rlflow.recipe import Data
from tests.unit.agents.scripted import SERVICE, ScriptedClient, play

GAME = "textarena:GuessTheNumber-v0"
# The import of the library takes three seconds.
pytestmark = pytest.mark.slow


def test_the_model_reads_only_what_is_new_and_earns_the_reward_of_the_game() -> None:
    guesses = [f"I say [{number}]" for number in range(1, 6)]
    client = ScriptedClient(*guesses)
    agent = load_agent(GAME, {"game_options": {"max_number": 5}, "system": "Play."})
    assert play(agent, client, {"seed": 3}) == Outcome(1.0, metrics={"invalid_move": 0.0})
    system, first, *rest = client.prompts[-1]
    assert system == {"role": "system", "content": "Play."}
    assert "between 1 and 5" in first["content"]
    observations = [message["content"] for message in rest if message["role"] == "user"]
    assert set(observations) <= {"The target number is higher."}


def test_a_wrong_move_ends_the_game_with_its_reward() -> None:
    outcome = play(load_agent(GAME, {}), ScriptedClient("what?", "what?"), {"seed": 3})
    assert outcome == Outcome(0.0, metrics={"invalid_move": 1.0})


def test_games_at_the_same_time_end_as_they_would_alone() -> None:
    """Blackjack draws cards with each move, from the random numbers of the process."""

    def move(messages: Sequence[Message]) -> str:
        totals = re.findall(r"total: (\d+)", str(messages), re.IGNORECASE) or ["0"]
        return "[Hit]" if int(totals[-1]) < 15 else "[Stand]"

    async def games(seeds: Sequence[int]) -> list[Any]:
        agent = load_agent("textarena:Blackjack-v0", {})
        await agent.open(SERVICE)
        clients = [ScriptedClient(*[move] * 99, seed=seed, pauses=True) for seed in seeds]
        outcomes = await asyncio.gather(*(agent.run(client, {}) for client in clients))
        return [(outcome, client.prompts[-1]) for outcome, client in zip(outcomes, clients, strict=True)]

    random.seed(1)
    state = random.getstate()
    together = asyncio.run(games(range(4)))
    assert random.getstate() == state
    assert together == [asyncio.run(games([seed]))[0] for seed in range(4)]
    assert len({str(prompt) for _, prompt in together}) == 4


def test_rows_are_seeds() -> None:
    train, test = (
        load_rows(
            Data(source=GAME, options={"size": 200}, split=split, batch_size=1, max_prompt_tokens=8),
            "split",
        )
        for split in ("train", "test")
    )
    seeds = [{row["seed"] for row in rows} for rows in (train, test)]
    assert seeds[0] | seeds[1] == set(range(200))
    assert not seeds[0] & seeds[1]
    assert 5 < len(test) < 40


def test_mistakes_are_named() -> None:
    with pytest.raises(RecipeError, match=r"environment: textarena has no game 'GuesTheNumber-v0'[\s\S]*did you mean"):
        play(load_agent("textarena:GuesTheNumber-v0", {}), ScriptedClient(), {})
    with pytest.raises(RecipeError, match=r"options\.max_number: unknown key"):
        load_agent(GAME, {"max_number": 5})
