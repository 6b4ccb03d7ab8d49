"""A taskset of verifiers whose environment answers the model: three turns, and a reward for the longest reply."""

# verifiers is unknown to mypy.
# mypy: disable-error-code="misc, untyped-decorator"

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameTask(vf.Task[vf.TaskData]):
    pass


class GameEnv(vf.Env[GameConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segments = [await interaction.turn()]
            for number in range(2):
                if not segments[-1].terminated:
                    segments.append(await interaction.turn(f"go on {number}"))
        interaction.trace.record_reward("longest", max(len(segment.last_reply) for segment in segments), 1.0)


class GameTaskset(vf.Taskset[GameTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GameTask]:
        number = 0
        while True:
            yield GameTask(vf.TaskData(prompt=f"game {number}"), self.config.task)
            number += 1


__all__ = ["GameEnv", "GameTaskset"]
