"""A reward and an agent for runs of benchmarks, in a module that their processes import quickly."""

from collections.abc import Sequence
from typing import Any

from rlflow.agents.base import Client
from rlflow.rewards.base import Row, batched


@batched(1024)
def text_length(texts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """Return the length of each text as its reward."""
    return [float(len(text)) for text in texts]


async def call_thrice(client: Client, row: Row) -> float:
    """Call with messages that begin with the row's prompt, and reward the length of all texts."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(3):
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": str(turn)}]
    return float(sum(len(message["content"]) for message in messages))
