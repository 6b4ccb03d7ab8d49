"""Measure agents whose tools take their time: ``python -m benchmarks.agents [--episodes N] [--json FILE]``.

4,096 episodes of 8 calls run on Ray, on two simulated hosts with two engines each. The engines have no model: replies
take the time of their decoding steps, with lengths of a long-tailed distribution. Between two calls an agent waits for
50 ms to 2 s, log-normal, at true scale. Everything between them is rlflow's: dispatcher, episodes, endpoints, HTTP,
workers. Agents call with tokens; ``--route chat`` runs 1,024 episodes that call with messages.

The ideal is a brute-force simulation of the same replies and delays without any overhead, in which a call may go to any
engine. ``largest_process_mb`` is the largest private memory that a process needs for the episodes.
"""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import paced_engine as paced
from benchmarks import service
from benchmarks.conversations import ENGINES, MAX_TOKENS, TURNS, measure, plan_of
from benchmarks.reporting import Goal, finish
from benchmarks.turn_schedule import bound, simulate
from rlflow.agents.base import Client
from rlflow.compiler.plan import Plan

EPISODES = {"tokens": 4096, "chat": 1024}
SHARE, LARGEST_MB = 0.9, 300.0


async def call_tokens(client: Client, row: Any) -> float:
    """Call with tokens, and wait after each reply."""
    ids = [1] * 16
    for turn in range(TURNS):
        reply = await client.generate(ids)
        ids = [*ids, *reply.ids, 2]
        await asyncio.sleep(service.delay(row["number"], turn))
    return 1.0


async def call_chat(client: Client, row: Any) -> float:
    """Call with messages, and wait after each reply."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": "more"}]
        await asyncio.sleep(service.delay(row["number"], turn))
    return 1.0


def plan_of_route(route: str) -> Plan:
    rollouts = (
        f"{{node: agent, role: rollout, group_size: 2, environment: 'benchmarks.agents:call_{route}',"
        f" max_calls: {TURNS}, turn_tokens: {MAX_TOKENS + 1}, max_tokens: 8000, processes: 1}}"
    )
    return plan_of(rollouts, "tokenizer: bytes", vocab_size=265)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of all runs."""
    yield from map(plan_of_route, EPISODES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--route", choices=EPISODES, default="tokens")
    parser.add_argument("--episodes", type=int, help="number of episodes")
    arguments = parser.parse_args()
    count = arguments.episodes or EPISODES[arguments.route]
    seconds, episodes, memory = measure(plan_of_route(arguments.route), count)
    assert episodes.turn_rewards.lengths.tolist() == [TURNS] * count
    assert episodes.finished.all()
    tokens = episodes.turn_lengths.values.reshape(count, TURNS).astype(np.float64)
    delays = np.array([[service.delay(row, turn) for turn in range(TURNS)] for row in range(count)])
    schedule = (tokens, delays, ENGINES, paced.SLOTS, paced.token_seconds)
    ideal = simulate(*schedule)
    table = Table("schedule", "seconds", "of the ideal")
    for name, value in {"bound": bound(*schedule), "ideal": ideal, "measured": seconds}.items():
        table.add_row(name, f"{value:.1f}", f"{ideal / value:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"mean wait {delays.mean():.2f} s, mean reply {tokens.mean():.0f} tokens")
    console.print("MB for episodes: " + ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(memory.items())))
    share = f"share_of_ideal_{arguments.route}"
    figures = {share: ideal / seconds, "largest_process_mb": max(memory.values())}
    goals = {
        share: Goal(f"at least {SHARE}", figures[share] >= SHARE),
        "largest_process_mb": Goal(f"at most {LARGEST_MB:g}", figures["largest_process_mb"] <= LARGEST_MB),
    }
    return finish("agents", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
