"""Disturb agents: ``python -m benchmarks.agent_faults [--faults N] [--quick] [--json FILE]``.

Batches of episodes run on an engine of agents over a random model, while faults that are drawn from a seed happen:
workers and endpoints are killed or stopped, agents raise, exit, sleep for ever or block their process, clients go away
in the middle of a call, and the engine interrupts episodes, which continue there or on another engine. What an
environment does follows from its row, so each episode must be what it is without faults.

- ``hangs``: batches that are not done within a limit.
- ``smaller_groups``: rows that are missing.
- ``different_weights``: rows whose tokens, logprobs, turns or rewards differ, so that an update on them would too.
- ``leftovers``: processes that live 10 s after their engines have stopped.
- ``replayed_share``: the calls that the record answered, of those that were asked again.
"""

import argparse
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.random_model import RandomModel
from benchmarks.reporting import Goal, finish
from rlflow.agents.agent_engine import AgentEngine
from rlflow.agents.options import AgentOptions
from rlflow.batch import Conversations, Packed, Prompts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress, PartialResponse
from rlflow.errors import EngineError, UserError
from rlflow.system.processes import children, descendants

FAULTS, QUICK, AT_ONCE, EPISODES = 200, 12, 4, 12
OUTSIDE = ("kill worker", "stop worker", "kill endpoint", "stop endpoint", "interrupt", "move")
INSIDE = ("raise", "exit", "sleep", "block", "disconnect")
MODEL_S, LATEST_S = 0.02, 0.6
LIMIT_S, LEFTOVER_S, SHARE = 150.0, 10.0, 0.9
SAMPLING = Sampling(max_tokens=600, temperature=1.0)


class SlowModel(RandomModel):
    """A random model that takes its time, and counts calls that it has to begin again."""

    def __init__(self) -> None:
        super().__init__(mean_tokens=8)
        self.started: set[bytes] = set()
        self.num_again = 0
        self.is_held = True
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> list[Any]:
        """Take calls."""
        for row, key in enumerate(samples.keys):
            resumes = partial is not None and len(partial[row].ids)
            self.num_again += key.tobytes() in self.started and not resumes
            self.started.add(key.tobytes())
        return super().submit(samples, sampling, partial)

    def _serve(self) -> None:
        while True:
            time.sleep(MODEL_S)
            self.release()
            self.is_held = True


def new_engine(model: RandomModel, folder: str) -> AgentEngine:
    """Return an engine in which each fault may cost an episode one try."""
    limits: Any = {"max_calls": 50, "turn_tokens": 16, "max_tokens": 600, "processes": 2, "timeout_s": 2.0}
    name = "benchmarks.faulty_agent:FaultyAgent"
    return AgentEngine(model, AgentOptions(environment=name, options={"folder": folder}, retries=AT_ONCE, **limits))


class Batch:
    """Episodes, and the faults that happen to them."""

    def __init__(self, number: int, faults: Sequence[str], random: Random) -> None:
        self.faults = faults
        rows: list[dict[str, Any]] = [
            {"number": row, "is_chat": row % 2 == 0, "turns": random.randint(4, 10), "fault_turn": -1}
            for row in range(EPISODES)
        ]
        self.calm = _samples(number, rows)
        inside = [fault for fault in faults if fault in INSIDE]
        for place, fault in zip(random.sample(range(EPISODES), len(inside)), inside, strict=True):
            turn = random.randrange(1, rows[place]["turns"])
            rows[place] = {**rows[place], "fault": fault, "fault_turn": turn, "fault_id": f"{number}-{place}"}
        self.samples = _samples(number, rows)


def _samples(number: int, rows: Sequence[dict[str, Any]]) -> Prompts:
    keys = np.array([[number, row, 0] for row in range(EPISODES)])
    return Prompts(keys=keys, ids=Packed.from_rows([[1]] * EPISODES, np.int32), rows=tuple(rows))


def undisturbed(batches: Sequence[Batch], folder: str) -> list[Any]:
    """Return the rollouts of batches without faults."""
    engine = new_engine(SlowModel(), folder)
    rollouts = [engine.generate(batch.calm, SAMPLING) for batch in batches]
    engine.stop()
    return rollouts


def disturb(engine: AgentEngine, fault: str, random: Random) -> None:
    """Send a signal to a process of an engine."""
    action, kind = fault.split()
    workers = children(engine._host._fork_server.pid)
    pid = engine._host._endpoint.pid if kind == "endpoint" else random.choice(workers or [0])
    with suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def run(engines: list[AgentEngine], samples: Prompts, faults: Sequence[str], random: Random) -> list[Any]:
    """Return the responses of a batch, or the errors instead."""
    started, futures = time.monotonic(), engines[0].submit(samples, SAMPLING)
    for at, fault in sorted((random.uniform(0.05, LATEST_S), fault) for fault in faults):
        time.sleep(max(0.0, started + at - time.monotonic()))
        if " " in fault:
            disturb(engines[0], fault, random)
            continue
        engines[0].abort([future for future in futures if not future.done()])
        rows = [row for row, future in enumerate(futures) if not future.exception() and not future.result().is_done]
        if fault == "move":
            engines.reverse()
        if rows:
            chosen = samples.take(np.array(rows))
            interrupted = engines[0].rollouts(chosen, [futures[row].result() for row in rows], SAMPLING)
            partial = GroupProgress(chosen, SAMPLING, interrupted).partial_responses(np.arange(len(rows)))
            for row, future in zip(rows, engines[0].submit(chosen, SAMPLING, partial), strict=True):
                futures[row] = future
    return [result_of(future, started + LIMIT_S - time.monotonic()) for future in futures]


def result_of(future: "Future[Any]", limit_s: float) -> Any:
    try:
        return future.result(max(0.0, limit_s))
    except (EngineError, UserError, TimeoutError) as error:
        return error


def count_different(batch: Conversations, rows: Sequence[int], expected: Conversations) -> int:
    """Return the number of rows of a batch that differ from these of another."""
    names = ("response_ids", "logprobs", "turn", "turn_rewards")
    return sum(
        not all(np.array_equal(getattr(batch, name)[place], getattr(expected, name)[row]) for name in names)
        or batch.rows[place]["environment_reward"] != expected.rows[row]["environment_reward"]
        for place, row in enumerate(rows)
    )


def all_faults(random: Random) -> Iterator[str]:
    """Yield faults without end, of all kinds equally often."""
    while True:
        yield from random.sample(OUTSIDE + INSIDE, len(OUTSIDE + INSIDE))


def measure(count: int, seed: int) -> dict[str, float]:
    """Let this number of faults happen, and return the figures."""
    random, figures, model = Random(seed), Counter[str](), SlowModel()
    kinds = list(islice(all_faults(random), count))
    with TemporaryDirectory() as folder:
        before = set(descendants(os.getpid()))
        firsts = range(0, count, AT_ONCE)
        batches = [Batch(number, kinds[first : first + AT_ONCE], random) for number, first in enumerate(firsts)]
        expected = undisturbed(batches, folder)
        engines = [new_engine(model, folder) for _ in range(2)]
        for number, batch in enumerate(batches):
            started = time.monotonic()
            responses = run(engines, batch.samples, [fault for fault in batch.faults if fault in OUTSIDE], random)
            rows = [row for row, response in enumerate(responses) if not isinstance(response, Exception)]
            samples = batch.samples.take(np.array(rows, np.int64))
            rollouts = engines[0].rollouts(samples, [responses[row] for row in rows], SAMPLING)
            figures["hangs"] += any(isinstance(response, TimeoutError) for response in responses)
            figures["smaller_groups"] += EPISODES - len(rows)
            figures["different_weights"] += count_different(rollouts, rows, expected[number])
            figures["replayed"] += sum(int(measures.get("recorded_calls", 0)) for measures in rollouts.measures)
            seconds = time.monotonic() - started
            print(f"{', '.join(batch.faults)}: {seconds:.1f} s", flush=True)
            for error in (response for response in responses if isinstance(response, Exception)):
                print(f"  {type(error).__name__}: {error}", flush=True)
        figures["leftovers"] = end(engines, before)
    share = figures["replayed"] / max(1, figures["replayed"] + model.num_again)
    counts = {name: float(figures[name]) for name in ("hangs", "smaller_groups", "leftovers", "different_weights")}
    return {"faults": float(count), **counts, "replayed_share": share}


def end(engines: Sequence[AgentEngine], before: set[int]) -> int:
    """Stop engines, and return the number of their processes that do not end."""
    for engine in engines:
        engine.stop()
    deadline = time.monotonic() + LEFTOVER_S
    while (left := set(descendants(os.getpid())) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=FAULTS, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} faults")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures = measure(QUICK if arguments.quick else arguments.faults, arguments.seed)
    goals = {name: Goal("0", value == 0) for name, value in figures.items()}
    goals["faults"] = Goal("as many as asked for", True)
    goals["replayed_share"] = Goal(f"at least {SHARE}", figures["replayed_share"] >= SHARE)
    return finish("agent_faults", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
