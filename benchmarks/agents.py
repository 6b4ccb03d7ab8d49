"""Measure agents whose tools take their time: ``python -m benchmarks.agents [--json FILE]``.

Episodes of 8 calls run on Ray, on two simulated hosts with two engines each. The engines have no model: replies take
the time of their decoding steps, with lengths of a long-tailed distribution. Between two calls an agent waits for 50 ms
to 2 s, log-normal, at true scale. Everything between them is rlflow's: dispatcher, episodes, endpoints, HTTP, workers.
Agents call in three ways:

- ``tokens``: 4,096 episodes that call with tokens
- ``chat``: 1,024 episodes that call with messages
- ``verifiers``: 256 episodes of a taskset of verifiers, whose CPU time counts, with that of the endpoint

``--route`` measures one of them, and ``--episodes`` another number.

``--route overlap`` is a run of 12 steps that generates two steps ahead of training, with ``in_flight: keep``. One in 32
episodes takes ten times as long as the median. No schedule beats the time of training, that of generation with every
slot in use, or a third of the time of a long episode and of training: an episode begins three steps before its own.

The ideal is a brute-force simulation of the same replies and delays without any overhead, in which a call may go to any
engine. The prediction is that of the plan, which knows the speed of the engines, the distribution of the lengths, and
the mean delay. ``largest_process_mb`` is the largest private memory that a process needs for the episodes.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import overlap, service, tasksets
from benchmarks import paced_engine as paced
from benchmarks.conversations import ENGINES, MAX_TOKENS, TURNS, TurnGenerator, measure, plan_of, prompts
from benchmarks.reporting import Goal, finish
from benchmarks.turn_schedule import bound, simulate
from rlflow.agents.base import Client
from rlflow.batch import Prompts
from rlflow.compiler.plan import Plan

EPISODES = {"tokens": 4096, "chat": 1024, "verifiers": 256}
ENVIRONMENTS = {
    "tokens": "benchmarks.agents:call_tokens",
    "chat": "benchmarks.agents:call_chat",
    "verifiers": "verifiers:waiting_game",
}
SHARE, LARGEST_MB, CPU_MS, ERROR = 0.9, 300.0, 45.0, 0.15
# The run with overlap: calls of an episode and their tokens, the seconds of its waits, and those of one in 32.
OVERLAP_CALLS, OVERLAP_TOKENS, SHORT_S, LONG_S = 4, 16, 0.05, 2.75
STALENESS = 2
# Equally likely lengths that a recipe expects.
_QUANTILES = 256


async def call_tokens(client: Client, row: Any) -> float:
    """Call with tokens, and wait after each reply."""
    ids = [1] * 16
    for turn in range(TURNS):
        reply = await client.generate(ids)
        ids = [*ids, *reply.ids, 2]
        await asyncio.sleep(service.delay(row["number"], turn))
    return 1.0


async def call_unevenly(client: Client, row: Any) -> float:
    """Call with tokens, and wait after each reply, in one of 32 episodes for long."""
    wait_s = LONG_S if client.random.random() < 1 / 32 else SHORT_S
    ids = [1] * 16
    for _ in range(OVERLAP_CALLS):
        ids = [*ids, *(await client.generate(ids)).ids, 2]
        await asyncio.sleep(wait_s)
    return 1.0


async def call_chat(client: Client, row: Any) -> float:
    """Call with messages, and wait after each reply."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": "more"}]
        await asyncio.sleep(service.delay(row["number"], turn))
    return 1.0


def plan_of_route(route: str, count: int) -> Plan:
    """Return the plan of ``count`` episodes."""
    rollouts = (
        f"{{node: agent, role: rollout, group_size: 2, environment: '{ENVIRONMENTS[route]}',"
        f" max_calls: {TURNS}, turn_tokens: {MAX_TOKENS + 1}, max_tokens: 8000, processes: 1}}"
    )
    replies = np.random.default_rng(0).choice(TurnGenerator.lengths, (64 * _QUANTILES, TURNS)).sum(axis=1)
    lengths = np.quantile(replies, (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    expect = f"{{prompt_tokens: [16], response_tokens: {lengths.tolist()}, wait_s: {delays_of(count).mean()}}}"
    batch = f"data.batch_size={count // 2}"
    return plan_of(rollouts, "tokenizer: bytes", 265, f"++expect={expect}", batch)


def plan_of_overlap() -> Plan:
    """Return the plan of the run that generates ahead of training."""
    rollouts = (
        f"{{node: agent, role: rollout, environment: 'benchmarks.agents:call_unevenly', max_calls: {OVERLAP_CALLS},"
        f" turn_tokens: {OVERLAP_TOKENS}, max_tokens: 200, processes: 1}}"
    )
    return overlap.plan_of(
        overlap.CASES["k = 2"],
        *overlap.APART,
        "models.policy={characters: null, tokenizer: bytes, architecture: {vocab_size: 265}}",
        f"++graph.rollouts={rollouts}",
        "graph.rewards.function=environment",
        "data.max_prompt_tokens=32",
    )


def delays_of(count: int) -> Any:
    """Return the seconds of the tools, [episodes, turns]."""
    return np.array([[service.delay(row, turn) for turn in range(TURNS)] for row in range(count)])


def tasks(first: int, count: int) -> Prompts:
    """Return rows that are tasks of verifiers too."""
    samples = prompts(first, count)
    rows = ({**row, "task": {"idx": row["number"], "prompt": "begin"}} for row in samples.rows)
    return Prompts(keys=samples.keys, ids=samples.ids, rows=tuple(rows))


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of all runs."""
    yield from (plan_of_route(route, 32) for route in EPISODES)
    yield plan_of_overlap()


def measure_route(route: str, count: int, console: Console) -> Mapping[str, float]:
    """Return the figures of one way to call."""
    plan = plan_of_route(route, count)
    predicted = plan.prediction.nodes["rollouts"].seconds
    console.print(f"{route}, {count} episodes: predicted {predicted:.1f} s")
    measured = measure(plan, count, tasks)
    seconds, episodes = measured.seconds, measured.conversations
    assert episodes.turn_rewards.lengths.tolist() == [TURNS] * count
    assert episodes.finished.all()
    tokens = episodes.turn_lengths.values.reshape(count, TURNS).astype(np.float64)
    delays = delays_of(count)
    schedule = (tokens, delays, ENGINES, paced.SLOTS, paced.token_seconds)
    ideal = simulate(*schedule)
    table = Table("schedule", "seconds", "of the ideal")
    for name, value in {"bound": bound(*schedule), "ideal": ideal, "predicted": predicted, "measured": seconds}.items():
        table.add_row(name, f"{value:.1f}", f"{ideal / value:.2f}")
    console.print(table)
    console.print(f"mean wait {delays.mean():.2f} s, mean reply {tokens.mean():.0f} tokens")
    console.print(f"CPU of endpoints and workers: {1000 * measured.cpu_s / count / TURNS:.1f} ms for each call")
    sizes = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(measured.memory_mb.items()))
    console.print(f"MB for episodes: {sizes}")
    if route == "verifiers":
        return {"cpu_ms_per_turn_verifiers": 1000 * measured.cpu_s / count / TURNS}
    largest, error = max(measured.memory_mb.values()), abs(seconds / predicted - 1)
    return {f"share_of_ideal_{route}": ideal / seconds, "largest_process_mb": largest, "prediction_error_max": error}


def measure_overlap(console: Console) -> Mapping[str, float]:
    """Return the figures of a run that generates ahead of training."""
    with patch("rlflow.runtime.ray.role_workers.EngineWorker", paced.PacedWorker):
        steps = overlap.metrics_of(plan_of_overlap())
    seconds = np.mean([step["seconds"] for step in steps])
    each = paced.token_seconds(paced.SLOTS)
    tokens = overlap.PROMPTS * overlap.GROUP_SIZE * OVERLAP_CALLS * OVERLAP_TOKENS
    long_s = OVERLAP_CALLS * (LONG_S + OVERLAP_TOKENS * paced.token_seconds(1))
    limits = {
        "training": paced.TRAIN_S,
        "generation": tokens / (paced.SLOTS * overlap.ENGINES) * each,
        "a long episode": (long_s + paced.TRAIN_S) / (STALENESS + 1),
    }
    console.print(
        f"a step takes {seconds:.2f} s; " + ", ".join(f"{name} {value:.2f} s" for name, value in limits.items())
    )
    staleness = max(step["overlap/staleness_max"] for step in steps)
    return {"share_of_bound_overlap": max(limits.values()) / float(seconds), "staleness_max": staleness}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--route", choices=[*EPISODES, "overlap"], help="measure only this one")
    parser.add_argument("--episodes", type=int, help="number of episodes")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    path = f"{Path(tasksets.__path__[0])}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with patch.dict(os.environ, PYTHONPATH=path):
        for route in [arguments.route] if arguments.route else EPISODES:
            console = Console(width=100)
            if route == "overlap":
                of_route = measure_overlap(console)
            else:
                of_route = measure_route(route, arguments.episodes or EPISODES[route], console)
            figures |= {name: max(value, figures.get(name, value)) for name, value in of_route.items()}
    goals = {
        "share_of_ideal_tokens": (SHARE, 1),
        "share_of_ideal_chat": (SHARE, 1),
        "cpu_ms_per_turn_verifiers": (CPU_MS, -1),
        "largest_process_mb": (LARGEST_MB, -1),
        "prediction_error_max": (ERROR, -1),
        "share_of_bound_overlap": (SHARE, 1),
        "staleness_max": (STALENESS, -1),
    }
    return finish(
        "agents",
        figures,
        {
            name: Goal(f"at {'least' if sign > 0 else 'most'} {limit:g}", sign * figures[name] >= sign * limit)
            for name, (limit, sign) in goals.items()
            if name in figures
        },
        arguments.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
