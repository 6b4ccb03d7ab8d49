"""Measure the process that drives a run: its scheduling of samples, and all that passes through it in a step.

``python -m benchmarks.driver [--json FILE]``

*Events.* An event is an engine's report of finished samples: the scheduler notes it, preempts if a cache is about to
overflow, and assigns queued samples. The figure is the mean over the events in which 64, 256 or 1,024 engines generate
a quarter of all samples, with response lengths that differ by a factor of a hundred.

*Steps.* On Ray, 2 engines generate 65,536 samples, and 64 workers on two other hosts score and train on them. Engines
have no model and take no time (``benchmarks/instant_engine.py``); scheduling, object stores, rewards, advantages and
the division among ranks are rlflow's. A step leaves out the weight sync.
The bytes are those of all messages to and from the driver. The workers share the CPUs of this machine with the driver,
and their work bounds ``samples_per_second``. ``samples_per_driver_second`` counts the CPU time of the driver alone.
"""

import argparse
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

import rlflow
from benchmarks import instant_engine as instant
from benchmarks.reporting import Goal, finish
from benchmarks.traffic import counted
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.generation.engine_state import Capacity
from rlflow.runtime.generation.scheduler import Scheduler
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training

_GOAL_MS = {64: 0.2, 256: 0.8, 1024: 3.5}
_SLOTS, _ROWS_PER_ENGINE, _GROUP_SIZE, _MAX_TOKENS, _PROMPT = 64, 128, 8, 8192, 128
# An engine reports when one in this many of its slots is finished.
_SHARE = 32

_PROMPTS, _RESPONSES = 4096, 16
_TRAINERS, _CLUSTER = 64, "1x2@cpu+2x32@cpu"
_STEPS = 5
_STORE = 1_000_000_000


def event_ms(engines: int, seed: int = 0) -> float:
    """Return the mean milliseconds of a scheduling event while half of the samples are queued."""
    generator = np.random.default_rng(seed)
    num_rows = engines * _ROWS_PER_ENGINE
    lengths = np.clip(generator.lognormal(6.5, 1.0, num_rows), 64, _MAX_TOKENS - 1).astype(np.int64)
    room = Capacity(_SLOTS, _SLOTS * 2048)
    prompts = np.full(num_rows // _GROUP_SIZE, _PROMPT)
    scheduler = Scheduler(
        prompts, Sampling(max_tokens=_MAX_TOKENS, group_size=_GROUP_SIZE), dict.fromkeys(range(engines), room)
    )
    steps = [0] * engines
    tokens = np.zeros(num_rows, np.int64)
    ends: list[dict[int, int]] = [{} for _ in range(engines)]
    """The step at which each row ends, by engine."""
    reports: list[tuple[int, int]] = []
    """A heap of the steps at which engines report next."""

    def start(assigned: dict[int, list[int]]) -> None:
        for rank, rows in assigned.items():
            ends[rank] |= {row: steps[rank] + int(lengths[row] - tokens[row]) for row in rows}

    def next_report(rank: int) -> int:
        return sorted(ends[rank].values())[: _SLOTS // _SHARE][-1]

    start(scheduler.assign())
    reports = [(next_report(rank), rank) for rank in range(engines)]
    heapq.heapify(reports)
    seconds, events = 0.0, 0
    while scheduler.num_queued > num_rows // 4:
        step, rank = heapq.heappop(reports)
        steps[rank] = max(step, steps[rank])
        done = [row for row, end in ends[rank].items() if end <= steps[rank]]
        for row in done:
            del ends[rank][row]
        before = time.thread_time()
        scheduler.finished(rank, done, lengths[done].tolist(), steps[rank])
        leaving_rank, leaving = scheduler.preempt(rank)
        if leaving:
            # The engine has generated up to the step of its own last report.
            left = [int(lengths[row]) - (ends[leaving_rank].pop(row) - steps[leaving_rank]) for row in leaving]
            tokens[leaving] = left
            scheduler.preempted(leaving_rank, leaving, left)
        assigned = scheduler.assign()
        seconds += time.thread_time() - before
        events += 1
        start(assigned)
        if ends[rank]:
            heapq.heappush(reports, (next_report(rank), rank))
    return seconds / events * 1e3


@dataclass(frozen=True)
class Steps:
    """The measurements of whole steps, for each sample."""

    seconds: float
    driver_seconds: float
    """CPU time of the driver's process."""
    messages: float
    nbytes: float


def plan_of(cluster: str, trainers: int, prompts: int, responses: int) -> Plan:
    """Return the plan of a step with 2 engines that generate, on a host of their own, and workers on other hosts."""
    recipe = rlflow.load(
        [
            "recipe=dr_grpo_tiny",
            "models.policy={recipe: null, random_weights: true, characters: '0123456789+='}",
            "models.policy.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 128,"
            " num_attention_heads: 2, num_hidden_layers: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 13,"
            f" max_position_embeddings: {instant.LIMIT + 64}}}",
            "roles.rollout={engine: vllm, gpus: 2, colocate: []}",
            f"roles.actor={{engine: fake, gpus: {trainers}}}",
            f"data.batch_size={prompts}",
            f"graph.rollouts={{group_size: {responses}, max_tokens: {instant.LIMIT}}}",
            "graph.rewards.function=benchmarks.text_rewards:text_length",
            "+graph.old_logprobs={node: logprobs, role: actor}",
        ]
    )
    return rlflow.compile(recipe, cluster)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of the steps."""
    yield plan_of(_CLUSTER, _TRAINERS, _PROMPTS, _RESPONSES)


def measure_steps(plan: Plan, samples: int, steps: int = _STEPS) -> Steps:
    """Run whole steps of so many samples on the hosts that are simulated now."""
    recipe, models = plan.recipe, models_in_use(plan.recipe)
    rows, tokenizer = load_rows(recipe.data, "split"), load_tokenizer("policy", models["policy"])
    data = open_training_data(recipe.data, tokenizer, rows, recipe.seed)
    with (
        patch("rlflow.runtime.ray.role_workers.EngineWorker", instant.InstantWorker),
        TemporaryDirectory() as folder,
        RayRuntime().start(plan, models, Path(folder)) as engines,
    ):
        assert isinstance(engines, RayEngines)
        hosted = engines.place_with_tokens(data)
        training = replace(Training.of(plan, engines, hosted), sync=lambda version: 0.0)
        # Processes start in the first step.
        train_step(training, 0)
        with counted() as traffic:
            train_step(training, 1)
        seconds, driver_seconds = [], []
        for step in range(2, steps + 2):
            before = time.process_time()
            seconds.append(train_step(training, step)["seconds"])
            driver_seconds.append(time.process_time() - before)
    return Steps(
        median(seconds) / samples,
        median(driver_seconds) / samples,
        traffic.messages / samples,
        traffic.nbytes / samples,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    events = {engines: event_ms(engines) for engines in _GOAL_MS}
    plan = plan_of(_CLUSTER, _TRAINERS, _PROMPTS, _RESPONSES)
    with simulated(plan.cluster, _STORE):
        steps = measure_steps(plan, _PROMPTS * _RESPONSES)
    figures = {
        **{f"event_ms_{engines}": value for engines, value in events.items()},
        "samples_per_second": 1 / steps.seconds,
        "samples_per_driver_second": 1 / steps.driver_seconds,
        "messages_per_sample": steps.messages,
        "bytes_per_sample": steps.nbytes,
    }
    goals = {
        **{
            f"event_ms_{engines}": Goal(f"at most {goal}", events[engines] <= goal)
            for engines, goal in _GOAL_MS.items()
        },
        "samples_per_second": Goal("at least 20000", figures["samples_per_second"] >= 20000),
        "samples_per_driver_second": Goal("for comparison", True),
        "messages_per_sample": Goal("at most 0.02", steps.messages <= 0.02),
        "bytes_per_sample": Goal("at most 100", steps.nbytes <= 100),
    }
    return finish("driver", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
