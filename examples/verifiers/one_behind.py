"""A taskset of verifiers: answer each message with the letter of the message before it.

    PYTHONPATH=examples/verifiers rlflow --config-dir examples/verifiers recipe=one_behind

The game ``42: kd`` continues with messages of one letter, such as ``r`` and ``a``. The replies k, d and r are right,
and each earns its share of 1. ``beginner`` has examples for a model that mostly repeats the last letter.
"""

# verifiers is unknown to mypy.
# mypy: disable-error-code="misc"

import random
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

import verifiers.v1 as vf

_TURNS = 3
_GAMES = 3000
# The share of right replies among the beginner's.
_RIGHT_SHARE = 0.3


class LettersData(vf.TaskData):
    """A task with the letters of its game, two of them in the first message."""

    letters: str


class LettersTask(vf.Task[LettersData]):
    """A game."""


class LettersConfig(vf.EnvConfig):
    """One agent, which answers."""

    player: vf.AgentConfig = vf.AgentConfig()


class LettersEnv(vf.Env[LettersConfig]):
    """Sends a letter in each turn, and rewards right replies."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one game."""
        letters, num_right = task.data.letters, 0
        async with agents.player.interaction(task) as interaction:
            for turn in range(_TURNS):
                segment = await interaction.turn(letters[turn + 1] if turn else None)
                if segment.terminated:
                    break
                num_right += segment.last_reply.strip() == letters[turn]
        interaction.trace.record_reward("right", num_right / _TURNS, 1.0)


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    """Games whose letters are drawn."""

    def load(self) -> Iterator[LettersTask]:
        """Yield the games."""
        for prompt, letters in _games(0):
            yield LettersTask(LettersData(prompt=prompt, letters=letters), self.config.task)


def beginner(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return games of a beginner, as prompt and response. Responses contain the messages of later turns."""
    draw, examples = random.Random(seed), []
    for prompt, letters in _games(seed + 1):
        response = ""
        for turn in range(_TURNS):
            newest = letters[turn + 1]
            message = f"<|im_end|>\n<|im_start|>user\n{newest}<|im_end|>\n<|im_start|>assistant\n" if turn else ""
            response += f"{message}{letters[turn] if draw.random() < _RIGHT_SHARE else newest}"
        examples.append({"prompt": [{"role": "user", "content": prompt}], "response": response})
    return examples


def _games(seed: int) -> Iterator[tuple[str, str]]:
    """Yield prompts and letters."""
    draw = random.Random(seed)
    for _ in range(_GAMES):
        letters = "".join(draw.choices(ascii_lowercase, k=_TURNS + 1))
        yield f"{draw.randrange(10, 100)}: {letters[:2]}", letters


__all__ = ["LettersEnv", "LettersTaskset"]
