"""Check the tokens of agents: ``python -m benchmarks.agent_tokens [--episodes N] [--json FILE]``.

1,000 episodes of a random model, of an agent that draws what it does: calls in parallel, requests that are repeated,
replies that are cut, a history that is compacted or edited, subagents, and further replies to the same messages. The
model keeps each prompt that it read with the reply that it sampled, and everything is compared with these:

- ``retokenized``: tokens of segments that the model did not read and sample in this form.
- ``untrained``, ``twice``: sampled tokens that no segment trains, and that are trained again.
- ``logprob_error_max``: the largest difference from the model's logprobs.
- ``differs_from_verifiers``: episodes whose sequences, or the tokens trained in them, differ from the branches of the
  trace graph of verifiers. That has no place for several replies to the same messages: such episodes do not count here.
"""

import argparse
import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.random_model import END, RandomModel, logprobs_of
from benchmarks.reporting import Goal, finish
from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.base import Agent, Client, LimitReachedError, Message, ModelService
from rlflow.agents.options import AgentOptions
from rlflow.batch import Conversations, Packed, Prompts
from rlflow.engines.base import Sampling, sample_seed

EPISODES, BATCH, MAX_TOKENS = 1000, 100, 1500
LIMITS: Any = {"max_calls": 60, "turn_tokens": 24, "max_tokens": MAX_TOKENS, "processes": 1}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
# A template would write it with other spaces.
TOOL_CALL = b'{"name":  "look","arguments":{"a": 1 }}'
TOOL_START, TOOL_END = 261, 262

Call = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, and its reply."""


@dataclass
class Wanderer(Agent):
    """An agent that does what it draws, and writes its calls to a file of the episode."""

    folder: str

    async def open(self, service: ModelService) -> None:
        """Open connections for repeated requests."""
        import aiohttp

        self.http = aiohttp.ClientSession()

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

    async def run(self, client: Client, row: Any) -> float:
        """Run one episode."""
        walk = Walk(client, self.http, row["number"])
        with suppress(LimitReachedError):
            await walk.chat(client.random.randint(3, 9))
        Path(self.folder, f"{row['number']}.json").write_text(json.dumps(walk.calls))
        return 1.0


class Walk:
    """One episode."""

    def __init__(self, client: Client, http: Any, number: int) -> None:
        self.client, self.http, self.random = client, http, client.random
        self.system = {"role": "system", "content": f"episode {number};"}
        self.calls: list[tuple[Sequence[Message], Message]] = []

    def say(self) -> Message:
        """Return a message with a text that is said once."""
        return {"role": "user", "content": f"more \u2713 <{self.random.getrandbits(40):010x}>"}

    async def ask(self, messages: Sequence[Message], limit: int | None = None) -> list[Message]:
        """Return the chat with a reply and what is said after it."""
        messages, repeats, said = list(messages), self.random.random() < 0.1, self.say()
        reply = await self.client.chat(messages, TOOLS, max_tokens=limit)
        self.calls.append((messages, reply.message))
        if repeats:
            await self.repeat(messages, limit, reply.message)
        calls = reply.message.get("tool_calls", ())
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "it is \u00e9"} for call in calls]
        return [*messages, reply.message, *answers, said]

    async def repeat(self, messages: Sequence[Message], limit: int | None, expected: Message) -> None:
        """Ask again as a client that got no answer."""
        body = {"messages": messages, "tools": TOOLS} | ({"max_tokens": limit} if limit else {})
        headers = {"Authorization": f"Bearer {self.client.api_key}", "x-stainless-retry-count": "1"}
        url = f"{self.client.base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            answer = (await response.json())["choices"][0]["message"]
        assert {name: value for name, value in answer.items() if value is not None} == expected

    async def chat(self, steps: int) -> None:
        """Hold a chat."""
        random, messages = self.random, [self.system, self.say()]
        for _ in range(steps):
            action = random.choice(("go on", "go on", "parallel", "cut", "compact", "edit", "subagent", "again"))
            if action == "parallel":
                chats = [[*messages[:-1], self.say()] for _ in range(random.randint(2, 3))]
                chosen = random.randrange(len(chats))
                messages = (await asyncio.gather(*map(self.ask, chats)))[chosen]
                continue
            if action == "compact":
                messages = [self.system, {"role": "user", "content": f"so far: {len(messages)}"}, *messages[-1:]]
            elif action == "edit" and len(messages) > 3:
                place = random.randrange(1, len(messages) - 1)
                messages = [*messages[:place], {**messages[place], "content": "(removed)"}, *messages[place + 1 :]]
            elif action == "subagent" and steps > 2:
                await self.chat(2)
            elif action == "again" and random.random() < 0.3:
                await self.ask(messages)
            messages = await self.ask(messages, random.randint(1, 4) if action == "cut" else None)


class Recorder(RandomModel):
    """A random model that calls tools now and then, and keeps what it read and sampled, by episode."""

    def __init__(self) -> None:
        super().__init__(mean_tokens=10)
        self.served: dict[int, list[Call]] = defaultdict(list)

    def _tokens(self, key: np.ndarray, sampling: Sampling) -> np.ndarray:
        if sample_seed(self.seed + 1, key) % 5:
            return super()._tokens(key, sampling)
        ids = [65, TOOL_START, *TOOL_CALL, TOOL_END, END]
        return np.array(ids[: sampling.max_tokens], np.int32)

    def submit(self, samples: Prompts, sampling: Sampling, partial: Any = None) -> list[Any]:
        """Answer at once."""
        futures = super().submit(samples, sampling, partial)
        for row, future in enumerate(futures):
            prompt = tuple(samples.ids[row].tolist())
            number = re.search(rb"episode (\d+);", text_of(prompt))
            assert number is not None
            self.served[int(number[1])].append((prompt, tuple(future.result().ids.tolist())))
        return futures


def text_of(ids: Sequence[int]) -> bytes:
    return bytes(token if token < 256 else 0 for token in ids)


def segments_of(batch: Conversations, row: int) -> Iterator[tuple[list[int], list[tuple[int, int, np.ndarray]]]]:
    """Yield the tokens of each segment, with the start, the end and the logprobs of each reply."""
    assert batch.prompt_segments is not None and batch.response_segments is not None  # noqa: PT018
    counts = batch.prompt_segments.runs_per_row
    counts = np.ones(len(batch), np.int64) if counts is None else counts
    first, count = int(counts[:row].sum()), int(counts[row])
    read, responded = 0, 0
    for number in range(first, first + count):
        prompt_length = int(batch.prompt_segments.run_lengths[number])
        length = int(batch.response_segments.run_lengths[number])
        prompt = batch.prompt_ids[row][read : read + prompt_length].tolist()
        piece = slice(responded, responded + length)
        turns, logprobs = batch.turn[row][piece], batch.logprobs[row][piece]
        starts = np.flatnonzero(np.diff(turns, prepend=-2))
        ends = [*starts[1:].tolist(), length]
        yield (
            prompt + batch.response_ids[row][piece].tolist(),
            [
                (prompt_length + start, prompt_length + end, logprobs[start:end])
                for start, end in zip(starts.tolist(), ends, strict=True)
                if turns[start] >= 0
            ],
        )
        read, responded = read + prompt_length, responded + length


def differs(chats: Sequence[Any], served: Sequence[Call], sequences: Counter[Any], trained: Counter[Call]) -> bool:
    """Compare an episode with the graph that verifiers makes of its calls."""
    from benchmarks.verifiers_graph import branches_of

    by_nonce = {re.findall(rb"<(\w{10})>", text_of(prompt))[-1].decode(): (prompt, reply) for prompt, reply in served}
    calls = [
        (messages, reply, *by_nonce[re.findall(r"<(\w{10})>", messages[-1]["content"])[-1]])
        for messages, reply in chats
    ]
    branches, replies = branches_of(calls, TOOLS)
    return sequences != branches or trained != replies


def measure(count: int) -> tuple[dict[str, float], int, int]:
    """Return the figures, and the numbers of calls and of episodes that verifiers can represent."""
    figures = Counter[str]()
    error, num_calls, num_compared = 0.0, 0, 0
    with TemporaryDirectory() as folder:
        options = AgentOptions(environment="benchmarks.agent_tokens:Wanderer", options={"folder": folder}, **LIMITS)
        model, sampling = Recorder(), Sampling(max_tokens=MAX_TOKENS, temperature=1.0)
        engine = AgentEngine(model, options)
        for first in range(0, count, BATCH):
            numbers = range(first, min(count, first + BATCH))
            keys = np.array([[0, number, 0] for number in numbers])
            ids = Packed.from_rows([[1]] * len(numbers), np.int32)
            batch = engine.generate(
                Prompts(keys=keys, ids=ids, rows=tuple({"number": number} for number in numbers)), sampling
            )
            assert isinstance(batch, Conversations)
            for row, number in enumerate(numbers):
                served = model.served.pop(number)
                trained, sequences = Counter[Call](), Counter[tuple[int, ...]]()
                for tokens, replies in segments_of(batch, row):
                    known = 0
                    for start, end, logprobs in replies:
                        call = tuple(tokens[:start]), tuple(tokens[start:end])
                        trained[call] += 1
                        known = end if call in served else known
                        error = max(error, float(np.abs(logprobs - logprobs_of(*call)).max()))
                    figures["retokenized"] += len(tokens) - known
                    sequences[tuple(tokens)] += 1
                figures["untrained"] += sum(len(reply) for _, reply in (Counter(served) - trained).elements())
                figures["twice"] += sum(len(reply) for _, reply in (trained - Counter(served)).elements())
                num_calls += len(served)
                if len({prompt for prompt, _ in served}) == len(served):
                    num_compared += 1
                    chats = json.loads(Path(folder, f"{number}.json").read_text())
                    figures["differs_from_verifiers"] += differs(chats, served, sequences, trained)
        engine.stop()
    names = ("retokenized", "untrained", "twice", "differs_from_verifiers")
    counts = {"sessions": float(count), **{name: float(figures[name]) for name in names}}
    return {**counts, "logprob_error_max": error}, num_calls, num_compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="number of episodes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures, num_calls, num_compared = measure(arguments.episodes)
    print(f"{arguments.episodes} episodes, {num_calls} calls; {num_compared} episodes compared with verifiers")
    limits = dict.fromkeys(figures, 0.0) | {"sessions": arguments.episodes, "logprob_error_max": 1e-4}
    goals = {name: Goal(f"at most {limits[name]:g}", value <= limits[name]) for name, value in figures.items()}
    return finish("agent_tokens", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
