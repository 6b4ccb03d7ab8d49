"""A taskset of verifiers for tests: sums, with a tool or without."""

# verifiers is unknown to mypy.
# mypy: disable-error-code="misc, untyped-decorator"

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class Sums(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A server with one tool."""

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumTask(vf.Task[SumData]):
    """A sum, with the reward 0.5 for the format and 1 for the answer."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        if self.data.answer < 0:
            raise ValueError("no such sum")
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def is_number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    count: int = 20
    has_tools: bool = False


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(self.config.count):
            yield SumTask(SumData(prompt=f"{number}+1?", system_prompt="Add.", answer=number + 1), self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[Any]:
        return [Sums(vf.ToolsetConfig())] if config.has_tools else []


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    Sums.run()
