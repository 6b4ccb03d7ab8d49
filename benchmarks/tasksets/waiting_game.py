"""A taskset of verifiers that waits before each of its turns, as for a service."""

# verifiers is unknown to mypy.
# mypy: disable-error-code="misc"

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from benchmarks.service import delay

TURNS = 8


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameTask(vf.Task[vf.TaskData]):
    pass


class GameEnv(vf.Env[GameConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for turn in range(1, TURNS):
                await asyncio.sleep(delay(task.data.idx, turn - 1))
                await interaction.turn("more")
            await asyncio.sleep(delay(task.data.idx, TURNS - 1))
        interaction.trace.record_reward("played", 1.0, 1.0)


class GameTaskset(vf.Taskset[GameTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GameTask]:
        number = 0
        while True:
            yield GameTask(vf.TaskData(idx=number, prompt="begin"), self.config.task)
            number += 1


__all__ = ["GameEnv", "GameTaskset"]
