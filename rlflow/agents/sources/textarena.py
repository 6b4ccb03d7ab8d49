"""Games of the library textarena for one player: ``environment: textarena:GuessTheNumber-v0``."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlflow.agents.base import Agent, Client, Message, ModelService, Outcome
from rlflow.errors import RecipeError, did_you_mean
from rlflow.extras import check_extra
from rlflow.rewards.base import Row
from rlflow.schema import parse


@dataclass
class TextArenaAgent(Agent):
    """A player of a game. Observations are the user's messages, and the game's reward comes at its end.

    The row's ``seed`` decides the game, or without one the sample's own seed.
    """

    game_options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the game, such as ``max_number``, in the place of those that it is registered with."""
    system: str = ""
    """A system message before the first observation."""

    def __post_init__(self) -> None:
        self.game = ""

    def prepare(self) -> None:
        """Import textarena, which takes three seconds."""
        import textarena  # noqa: F401

    async def open(self, service: ModelService) -> None:
        """Check that the game exists."""
        check_game(self.game, "environment")

    async def run(self, client: Client, row: Row) -> Outcome:
        """Play one game."""
        game = _Game(self.game, self.game_options, int(row.get("seed", client.seed)))
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        done = False
        while not done:
            messages.append({"role": "user", "content": game.observe()})
            reply = await client.chat(messages)
            messages.append(reply.message)
            done = game.step(reply.text)
        rewards, info = game.close()
        return Outcome(float(rewards[0]), metrics={"invalid_move": float(info[0]["invalid_move"])})


class _Game:
    """A game with random numbers of its own: games draw from those of the process, which runs many at a time."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        import textarena

        self._random = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())
        with self._drawing():
            self._wrapped = textarena.make(name, **options)
            self._wrapped.reset(num_players=1)
        self._inner = self._wrapped
        while isinstance(self._inner, textarena.Wrapper):
            self._inner = self._inner.env
        self._own_moves = textarena.ObservationType.PLAYER_ACTION

    def observe(self) -> str:
        """Return what is new since the last observation. Wrappers would repeat the whole game each time."""
        with self._drawing():
            _, observation = self._inner.get_observation()
        return "\n".join(text for _, text, kind in observation if kind != self._own_moves)

    def step(self, action: str) -> bool:
        """Make a move, and return whether the game is over."""
        with self._drawing():
            done, _ = self._wrapped.step(action)
        return bool(done)

    def close(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, Any]]]:
        """Return the rewards and the infos of the players."""
        rewards, info = self._wrapped.close()
        return rewards, info

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let the process draw from this game's random numbers."""
        before = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])


def check_game(game: str, path: str) -> None:
    """Raise RecipeError at ``path`` for a game that the library does not have."""
    from textarena.envs.registration import ENV_REGISTRY

    if game not in ENV_REGISTRY:
        raise RecipeError(
            path, f"textarena has no game '{game}'", fix=did_you_mean(game, ENV_REGISTRY) or "see textarena.ai"
        )


def game_rows(game: str) -> Callable[..., list[dict[str, Any]]]:
    """Return the function that makes the rows of ``data.source: textarena:GAME``. Raises RecipeError."""
    check_extra("textarena", "data.source", "its game")
    check_game(game, "data.source")
    return partial(_rows, game)


def _rows(game: str, size: int = 2000) -> list[dict[str, Any]]:
    """Return a row for each seed below ``size``."""
    return [{"prompt": f"{game} with the seed {seed}", "seed": seed} for seed in range(size)]


def load(target: str, options: Mapping[str, Any]) -> TextArenaAgent:
    """Create the agent of a game. Raises RecipeError."""
    check_extra("textarena", "environment", "its game")
    agent = parse(TextArenaAgent, options, "options")
    agent.game = target
    return agent
