"""Measure the overhead of the processes that run reward functions: ``python -m benchmarks.rewards [--json FILE]``.

rlflow's pool and a bare ``multiprocessing.Pool`` compute 10,000 rewards of one millisecond each, one response per call,
in turn. The ideal is one millisecond per reward, divided by the number of CPUs.

Then 1, 2 and 4 simulated hosts judge the samples that lie on them with a function that waits 20 ms, as for a service.
All hosts share the CPUs of this machine, so a function that computes would show nothing. The ideal is 20 ms per reward,
divided by the workers of all hosts.
"""

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import Goal, finish
from rlflow.batch import Packed, Repeated, Rollouts
from rlflow.nodes.reward import Reward
from rlflow.recipe.compose import load_cluster
from rlflow.rewards.callables import RewardTerm
from rlflow.rewards.pool import ProcessPool
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.system.processes import num_usable_cpus

_REWARDS, _SECONDS, _REPEATS = 10_000, 0.001, 3
_HOSTS, _SAMPLES, _WAIT_S = (1, 2, 4), 1024, 0.02


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
    rows = [{"answer": text} for text in texts]
    began = time.perf_counter()
    outcomes = [future.result() for future in as_completed(pool.submit("work", texts, rows))]
    seconds = time.perf_counter() - began
    assert outcomes == [1.0] * len(texts)
    return seconds


def in_peer(peer: Any, texts: Sequence[str]) -> float:
    began = time.perf_counter()
    assert peer.map(bare, texts) == [1.0] * len(texts)
    return time.perf_counter() - began


def after_a_wait(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1.0 for each text after 20 ms without work."""
    time.sleep(_WAIT_S)
    return [1.0] * len(texts)


class Samples:
    """Makes responses of 1,000 characters on the host where it is."""

    def make(self, count: int) -> Rollouts:
        """Return that many samples of different prompts."""
        ids = Packed(np.zeros(count, np.int32), np.arange(count + 1))
        return Rollouts(
            keys=np.arange(count)[:, None] * np.array([0, 1, 0]),
            prompt_ids=ids,
            response_ids=ids,
            logprobs=ids.like(np.zeros(count, np.float32)),
            versions=Repeated(np.zeros(count, np.int32), ids.lengths),
            finished=np.ones(count, np.bool_),
            temperature=1.0,
            texts=("x" * 1000,) * count,
            rows=({},) * count,
        )


def on_hosts(count: int) -> float:
    """Return the seconds in which simulated hosts judge equal parts of all samples, once their processes run."""
    with simulated(load_cluster(f"{count}x1@cpu")):
        # This imports Ray, which reads its variables then.
        from rlflow.runtime.ray.cluster.hosts import host_names
        from rlflow.runtime.ray.cluster.services import RayServices
        from rlflow.runtime.ray.remote_objects import DividedNode, RemoteObjects
        from rlflow.runtime.ray.waits import Waits
        from rlflow.runtime.ray.watchdog import Watchdog

        limits = Waits({}, other_s=60.0), Watchdog(RayServices({}))
        names = host_names({})
        with RemoteObjects(StoreUsage(names), *limits, simulated=True) as objects:
            maker = Samples()
            parts = [objects.proxy_of(maker, host).submit("make", {"count": _SAMPLES // count}) for host in names]
            batch = Rollouts.concatenate(wait_all(parts))
            judge = DividedNode(Reward(function="benchmarks.rewards:after_a_wait"), objects)
            seconds = []
            for _ in range(1 + _REPEATS):
                began = time.perf_counter()
                assert judge.run(rollouts=batch).values.sum() == _SAMPLES
                seconds.append(time.perf_counter() - began)
            return median(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = ["x" * 1000] * _REWARDS
    num_workers = num_usable_cpus()
    pool = ProcessPool({"work": RewardTerm(function="benchmarks.rewards:one_millisecond")}, num_workers)
    seconds: dict[str, list[float]] = {"rlflow": [], "multiprocessing": []}
    with multiprocessing.get_context("spawn").Pool(num_workers) as peer:
        # The first rewards wait for processes to start.
        in_pool(pool, texts[:100])
        in_peer(peer, texts[:100])
        for _ in range(_REPEATS):
            seconds["rlflow"].append(in_pool(pool, texts))
            seconds["multiprocessing"].append(in_peer(peer, texts))
    pool.stop()
    ideal = _REWARDS * _SECONDS / num_workers
    table = Table("pool", "workers", "s", "of ideal")
    for name, measured in seconds.items():
        table.add_row(name, str(num_workers), f"{median(measured):.2f}", f"{ideal / median(measured):.0%}")
    Console(width=120).print(table)
    ours, theirs = (ideal / median(measured) for measured in seconds.values())
    by_hosts = {count: on_hosts(count) for count in _HOSTS}
    table = Table("hosts", "rewards/s", "of ideal")
    for count, took in by_hosts.items():
        best = _SAMPLES * _WAIT_S / (count * num_usable_cpus())
        table.add_row(str(count), f"{_SAMPLES / took:.0f}", f"{best / took:.0%}")
    Console(width=120).print(table)
    gained = by_hosts[1] / by_hosts[4]
    figures = {
        "share_of_ideal": ours,
        "share_of_ideal_multiprocessing": theirs,
        "rewards_per_second_4_hosts_over_1": gained,
    }
    goals = {
        "share_of_ideal": Goal("at least 0.8", ours >= 0.8),
        "share_of_ideal_multiprocessing": Goal("the peer", True),
        "rewards_per_second_4_hosts_over_1": Goal("at least 3.5", gained >= 3.5),
    }
    return finish("rewards", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
