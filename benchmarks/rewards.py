"""Measure the overhead of the processes that run reward functions: ``python -m benchmarks.rewards [--json FILE]``.

rlflow's pool and a bare ``multiprocessing.Pool`` compute 10,000 rewards of one millisecond each, one response per call,
in turn. The ideal is one millisecond per reward, divided by the number of CPUs.
"""

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reporting import Goal, finish
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.calls import Call
from rlflow.rewards.pool import ProcessPool

_REWARDS, _SECONDS, _REPEATS = 10_000, 0.001, 3


def one_millisecond(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1.0 for each text after one millisecond of work."""
    for _ in texts:
        until = time.perf_counter() + _SECONDS
        while time.perf_counter() < until:
            pass
    return [1.0] * len(texts)


def bare(text: str) -> float:
    """Return the reward of one text, in the form that ``multiprocessing.Pool`` calls."""
    return one_millisecond([text], [{}])[0]


def in_pool(pool: ProcessPool, texts: Sequence[str]) -> float:
    calls = [Call("work", [place], [text], [{"answer": text}]) for place, text in enumerate(texts)]
    began = time.perf_counter()
    outcomes = [outcome for _, given in pool.outcomes(calls) for outcome in given]
    seconds = time.perf_counter() - began
    assert outcomes == [1.0] * len(texts)
    return seconds


def in_peer(peer: Any, texts: Sequence[str]) -> float:
    began = time.perf_counter()
    assert peer.map(bare, texts) == [1.0] * len(texts)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = ["x" * 1000] * _REWARDS
    pool = ProcessPool({"work": RewardTerm(function="benchmarks.rewards:one_millisecond")})
    seconds: dict[str, list[float]] = {"rlflow": [], "multiprocessing": []}
    with multiprocessing.get_context("spawn").Pool(pool.num_workers) as peer:
        # The first rewards wait for processes to start.
        in_pool(pool, texts[:100])
        in_peer(peer, texts[:100])
        for _ in range(_REPEATS):
            seconds["rlflow"].append(in_pool(pool, texts))
            seconds["multiprocessing"].append(in_peer(peer, texts))
    pool.stop()
    ideal = _REWARDS * _SECONDS / pool.num_workers
    table = Table("pool", "workers", "s", "of ideal")
    for name, measured in seconds.items():
        table.add_row(name, str(pool.num_workers), f"{median(measured):.2f}", f"{ideal / median(measured):.0%}")
    Console(width=120).print(table)
    ours, theirs = (ideal / median(measured) for measured in seconds.values())
    figures = {"share_of_ideal": ours, "share_of_ideal_multiprocessing": theirs}
    goals = {
        "share_of_ideal": Goal("at least 0.8", ours >= 0.8),
        "share_of_ideal_multiprocessing": Goal("the peer", True),
    }
    return finish("rewards", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
