"""Agents for tests. What they do follows from the row."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.agents.base import Agent, Client, ModelService, Outcome


async def chat(client: Client, row: Any) -> float:
    """Ask ``turns`` times; the reward is the number of characters of all replies."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    total = 0
    for turn in range(row["turns"]):
        reply = await client.chat(messages)
        total += len(reply.text)
        messages += [reply.message, {"role": "user", "content": f"{turn} more"}]
    return float(total)


async def tokens(client: Client, row: Any) -> float:
    """Extend one sequence of tokens, with two tokens between two replies."""
    ids = [1, 2, 3]
    for turn in range(row["turns"]):
        reply = await client.generate(ids)
        ids = [*ids, *reply.ids, 10, 11]
        client.give_reward(turn + 1)
    return 0.5


async def tree(client: Client, row: Any) -> float:
    """Call in parallel, ask the same again, continue earlier sequences, and begin new ones."""
    random = client.random
    sequences: list[list[int]] = [[5]]
    for _ in range(row["turns"]):
        prompts = []
        for _ in range(random.randint(1, 3)):
            start = random.choice(sequences)
            if random.random() < 0.3:
                start = start[: random.randint(1, len(start))]
            prompts.append([*start, *(random.randrange(265) for _ in range(random.randint(0, 2)))])
        replies = await asyncio.gather(*(client.generate(prompt) for prompt in prompts))
        sequences += [[*prompt, *reply.ids] for prompt, reply in zip(prompts, replies, strict=True)]
    return 1.0


@dataclass
class Faulty(Agent):
    """Fails in the way that the row says, as often as it says; a file counts the attempts."""

    folder: str

    async def run(self, client: Client, row: Any) -> Outcome | float:
        """Make a call, maybe fail, and make another."""
        first = await client.generate([1, row["number"]])
        attempts = Path(self.folder) / str(row["number"])
        attempts.write_text(attempts.read_text() + "." if attempts.exists() else ".")
        if len(attempts.read_text()) <= row["failures"]:
            if row["fault"] == "raise":
                raise ValueError("the shop is closed")
            if row["fault"] == "exit":
                os._exit(3)
            if row["fault"] == "sleep":
                await asyncio.sleep(3600)
            if row["fault"] == "block":
                time.sleep(3600)
        second = await client.generate([1, row["number"], *first.ids, 2])
        return Outcome(float(len(second.ids)), metrics={"tool_s": 0.25})


@dataclass
class KeyNoter(Agent):
    """Notes the keys of its worker and of each episode in files, fails once, and then answers."""

    folder: str

    async def open(self, service: ModelService) -> None:
        """Note the worker's key."""
        Path(self.folder, service.key).touch()

    async def run(self, client: Client, row: Any) -> float:
        """Make a call in the second attempt."""
        Path(self.folder, client.api_key).touch()
        try:
            Path(self.folder, f"attempt-{client.seed}").touch(exist_ok=False)
        except FileExistsError:
            return float(len((await client.chat([{"role": "user", "content": row["prompt"]}])).text))
        raise RuntimeError(f"{client.base_url} is closed")
