"""Compare the generation scheduler with one that knows every length: ``python -m benchmarks.tail [--json FILE]``.

Engines are simulated with the planner's decoding times. Lengths are log-normal with the mean and the limit of a
published run. Lengths of one prompt are correlated: on the scale of a normal distribution (a Gaussian copula), a share
of the variance belongs to the prompt and the rest to the sample. That share is not published, so it is varied.

The simulation compares four schedulers:

- static shards;
- dispatch when free, sample by sample in the order of the data; vLLM fills its cache and preempts when it is full;
- rlflow's scheduler, which knows the lengths of the previous step;
- an oracle that knows every length and fills the cache exactly; it uses the better of longest first, and longest first
  in shards with equally many tokens.

Every figure is the mean over seeds that were not used to choose the scheduler's constants. Where the goal is missed,
rlflow's scheduler runs again with a single engine that is as fast and has as much cache as all of them ("as one"). What
is still missing then is not due to the placement of samples on engines.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.engine_simulator import Outcome, Samples, Speed, simulate
from benchmarks.reporting import Goal, finish
from benchmarks.tail_sources import Oracle, fifo, static
from rlflow.compiler.plan import Plan
from rlflow.engines.base import Sampling
from rlflow.recipe.compose import load_cluster
from rlflow.resources.time.decoder import decoder_of
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency, gpu_speed
from rlflow.runtime.generation.engine_state import Capacity
from rlflow.runtime.generation.scheduler import Scheduler


@dataclass(frozen=True)
class Run:
    """A published run's lengths, in tokens."""

    name: str
    prompt: int
    """Tokens of a prompt: an assumption, because only the sum with the response is published."""
    mean: int
    limit: int


# NeMo-RL's performance tables for v0.4 to v0.6, "G-Average seq len (prompt+response)", 8 H100 or GB200 hosts and more.
RUNS = (
    Run("DeepSeek-V3", prompt=150, mean=595, limit=1536),
    Run("Qwen3-32B", prompt=150, mean=3056, limit=4096),
    Run("Qwen3-235B-A22B", prompt=150, mean=5550, limit=8192),
    # A quarter of its lengths, which exceed the positions of the simulated model.
    Run("Nemotron-3-Nano / 4", prompt=62, mean=7837, limit=32768),
)


@dataclass(frozen=True)
class Site:
    """Engines of a model on H100s."""

    recipe: str
    gpus_each: int
    engines: int
    prompts: int


SMALL = Site("grpo_7b", gpus_each=1, engines=8, prompts=256)
LARGE = Site("grpo_7b", gpus_each=1, engines=64, prompts=1024)
GROUP_SIZE = 16
# rlflow's limit for vLLM.
SEQUENCES = 1024
SEEDS = (0, 1, 2)
GOAL = 0.92
# The engines, and the prompt's share of the variance.
CASES = ((SMALL, 0.3), (SMALL, 0.5), (SMALL, 0.7), (LARGE, 0.5))


def plan_of(site: Site) -> Plan:
    return rlflow.compile(rlflow.load([f"recipe={site.recipe}"]), "1x8")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the models that are simulated."""
    yield from (plan_of(site) for site in (SMALL, LARGE))


def engine_of(site: Site) -> tuple[Speed, Capacity]:
    """Return an engine's speed and room: 0.85 of the GPUs' memory without the weights."""
    model = plan_of(site).recipe.models["policy"].architecture
    cluster = load_cluster("1x8")
    gpu = next(iter(cluster.gpus.values()))
    assert model is not None
    assert gpu.memory_gib is not None
    speed = gpu_speed(gpu, 8, Efficiency())
    decoder = decoder_of(model, site.gpus_each, 1, speed, 2)
    free = 0.85 * gpu.memory_gib * 2**30 * site.gpus_each - 2 * model.num_parameters
    tokens = int(free / (2 * model.kv_values_per_token))
    return Speed(decoder, lambda count: decoder.prefill(speed, count, count)), Capacity(SEQUENCES, tokens)


def samples_of(run: Run, prompts: int, correlation: float, seed: int) -> Samples:
    draw = np.random.default_rng(seed)
    of_prompt = np.repeat(draw.standard_normal(prompts), GROUP_SIZE)
    scores = correlation**0.5 * of_prompt + (1 - correlation) ** 0.5 * draw.standard_normal(len(of_prompt))
    normal = NormalDist()
    places = np.array([normal.cdf(score) for score in scores])
    lengths = np.array(Lengths.log_normal(run.mean, run.limit).values)
    return Samples(
        prompts=np.full(len(scores), run.prompt),
        lengths=np.ceil(lengths[(places * len(lengths)).astype(np.int64)]).astype(np.int64),
        groups=np.repeat(np.arange(prompts), GROUP_SIZE),
    )


@dataclass(frozen=True)
class Compared:
    static: Outcome
    pulled: Outcome
    scheduled: Outcome
    oracle: Outcome
    controller_s: float
    """CPU seconds of the scheduler on this machine, for the whole step."""


def as_one(run: Run, site: Site, correlation: float, seed: int) -> float:
    """Return the seconds of rlflow's scheduler with one engine that combines all of them."""
    speed, room = engine_of(site)
    samples, count = samples_of(run, site.prompts, correlation, seed), site.engines
    parts = {name: getattr(speed.decoder, name) / count for name in ("arithmetic", "each", "keys", "windowed_keys")}
    pooled = Speed(replace(speed.decoder, **parts), lambda tokens: speed.prefill(tokens) / count)
    whole = Capacity(room.sequences * count, room.tokens * count)
    scheduler = Scheduler(
        np.full(site.prompts, run.prompt), Sampling(max_tokens=run.limit, group_size=GROUP_SIZE), {0: whole}
    )
    return simulate(samples, pooled, whole, 1, scheduler).seconds


class Timed:
    """A scheduler with a count of the seconds that it takes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seconds = 0.0

    def assign(self) -> dict[int, list[int]]:
        began = time.process_time()
        rows = self._scheduler.assign()
        self.seconds += time.process_time() - began
        return rows

    def preempt(self, rank: int) -> tuple[int, list[int]]:
        began = time.process_time()
        of, rows = self._scheduler.preempt(rank)
        self.seconds += time.process_time() - began
        return of, rows

    def preempted(self, rank: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._scheduler.preempted(rank, rows, lengths)

    def finished(self, rank: int, rows: Sequence[int], lengths: Sequence[int], steps: int) -> None:
        began = time.process_time()
        self._scheduler.finished(rank, rows, lengths, steps)
        self.seconds += time.process_time() - began


def compare(run: Run, site: Site, correlation: float, seed: int) -> Compared:
    """Simulate all schedulers; each must generate every sample exactly once."""
    speed, room = engine_of(site)
    samples = samples_of(run, site.prompts, correlation, seed)
    before: NDArray[np.float64] = samples_of(run, site.prompts, correlation, seed + 1000).lengths.astype(np.float64)
    rooms = dict.fromkeys(range(site.engines), room)
    lengths = np.full(site.prompts, run.prompt)
    ours = Timed(
        Scheduler(lengths, Sampling(max_tokens=run.limit, group_size=GROUP_SIZE), rooms, previous_lengths=before)
    )
    args = samples, room, site.engines
    ways = static(*args), fifo(*args), ours, Oracle(*args, shards=False), Oracle(*args, shards=True)
    outcomes = [simulate(samples, speed, room, site.engines, source) for source in ways]
    assert all(sorted(outcome.kept) == list(range(len(samples.lengths))) for outcome in outcomes)
    of_static, of_pulled, of_ours, first, second = outcomes
    oracle = min(first, second, key=lambda outcome: outcome.seconds)
    return Compared(of_static, of_pulled, of_ours, oracle, ours.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    table = Table(
        *("lengths", "engines", "correlation", "oracle s", "static", "when free", "as one", "rlflow"),
        *("preempted: static", "when free", "rlflow", "moved by rlflow", "idle", "scheduler s"),
        title=f"share of the oracle's throughput, mean of seeds {SEEDS}",
    )
    shares = []
    for run in RUNS:
        for site, correlation in CASES:
            found = [compare(run, site, correlation, seed) for seed in SEEDS]
            ways = [(each.static, each.pulled, each.scheduled) for each in found]
            oracle = np.array([each.oracle.seconds for each in found])
            share = (oracle[:, None] / [[way.seconds for way in each] for each in ways]).mean(0)
            preempted = np.mean([[way.preemptions for way in each] for each in ways], 0)
            shares.append(share)
            one = ""
            if share[2] < GOAL:
                one = f"{(oracle / [as_one(run, site, correlation, seed) for seed in SEEDS]).mean():.3f}"
            table.add_row(
                *(run.name, str(site.engines), f"{correlation}", f"{oracle.mean():.0f}"),
                *(f"{share[0]:.3f}", f"{share[1]:.3f}", one, f"{share[2]:.3f}"),
                *(f"{each:.0f}" for each in preempted),
                f"{np.mean([each.scheduled.put_off for each in found]):.0f}",
                f"{np.mean([each.scheduled.idle for each in found]):.2f}",
                f"{np.mean([each.controller_s for each in found]):.2f}",
            )
    Console(width=150).print(table)
    names = ("share_static", "share_pulled", "share_of_oracle_throughput")
    worst, mean = np.min(shares, 0).tolist(), np.mean(shares, 0).tolist()
    figures = dict(zip(names, worst, strict=True)) | {
        f"{name}_mean": each for name, each in zip(names, mean, strict=True)
    }
    goals = dict.fromkeys(figures, Goal("for comparison", True))
    goals["share_of_oracle_throughput"] = Goal(f"at least {GOAL}", figures["share_of_oracle_throughput"] >= GOAL)
    return finish("tail", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
