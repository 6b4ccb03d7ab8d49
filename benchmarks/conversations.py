"""Measure conversations with an environment that takes its time: ``python -m benchmarks.conversations [--json FILE]``.

4,096 conversations of 8 turns run on Ray, on two simulated hosts with two engines each. The engines have no model:
turns take the time of their decoding steps, with lengths of a long-tailed distribution. A call of the environment takes
50 ms to 2 s, log-normal, at true scale. Everything between them is rlflow's: dispatcher, sessions, transcripts, worker
processes.

The ideal is a brute-force simulation of the same turns and delays without any overhead, in which a turn may go to any
engine. The table also has the bound that no schedule beats, and the time if each turn waited for all conversations.

``largest_process_mb`` is the largest private memory of a process for the conversations: what the driver, the engines
and Ray's processes have more than when idle, and all that processes of the environment have.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks import paced_engine as paced
from benchmarks import service
from benchmarks.reporting import Goal, finish
from benchmarks.turn_schedule import bound, lock_step, simulate
from rlflow.batch import Conversations, Packed, Prompts, Rollouts
from rlflow.compiler import compile_recipe
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency
from rlflow.runtime.objects.store_usage import count_towards
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.system.processes import descendants

CONVERSATIONS, TURNS, ENGINES = 4096, 8, 4
MEAN_TOKENS, MAX_TOKENS = 100, 500
# Worker processes of the environment beside each engine.
PROCESSES = 64
# Conversations before the measured ones, which load libraries and start processes.
WARM_UP = 256
SHARE, LARGEST_MB = 0.9, 200.0
# Seconds between two looks at the memory of all processes.
_LOOK_S = 5.0


class TurnGenerator(paced.PacedGenerator):
    """An engine whose responses have the lengths of turns."""

    lengths: ClassVar[Sequence[float]] = Lengths.log_normal(MEAN_TOKENS, MAX_TOKENS).values


class TurnWorker(paced.PacedWorker):
    """A worker process with such an engine."""

    generator = TurnGenerator

    def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()


class Dropped:
    """A subscriber that needs no samples; with one, engines deliver their rollouts in parts, as in a step."""

    def receive(self, rank: int, part: Rollouts) -> None:
        """Receive samples that an engine has finished."""

    def discard_engine(self, rank: int) -> None:
        """Discard nothing."""


@dataclass(frozen=True)
class Measured:
    """A generation, and what it took."""

    seconds: float
    conversations: Conversations
    memory_mb: Mapping[str, float]
    """The largest memory for conversations, by kind of process."""
    cpu_s: float
    """CPU time of the processes that engines have started."""


class Usage:
    """The private memory of this process and of all that it started, and CPU time."""

    def __init__(self, engines: Sequence[int]) -> None:
        """Count from now on. ``engines`` are the processes of engines."""
        self._engines = engines
        self._idle, self._busy_s = private_mb([os.getpid(), *descendants(os.getpid())]), self._cpu_seconds()
        self._peaks: dict[int, float] = {}
        self._stop = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the peak of each process within the context."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def cpu_seconds(self) -> float:
        """Return the CPU time of the engines' own processes until now."""
        return self._cpu_seconds() - self._busy_s

    def memory_mb(self) -> Mapping[str, float]:
        """Return the largest memory for conversations, by kind of process."""
        environments = {pid for engine in self._engines for pid in descendants(engine)}
        largest: dict[str, float] = {}
        for pid, peak in self._peaks.items():
            kind = "driver" if pid == os.getpid() else "Ray"
            kind = "engine" if pid in self._engines else "environment" if pid in environments else kind
            before = 0.0 if pid in environments else self._idle.get(pid, 0.0)
            largest[kind] = max(largest.get(kind, 0.0), peak - before)
        return largest

    def _cpu_seconds(self) -> float:
        seconds = 0.0
        for pid in {pid for engine in self._engines for pid in descendants(engine)}:
            with suppress(OSError):  # it has ended
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        return seconds

    def _watch(self) -> None:
        while True:
            is_over = self._stop.wait(_LOOK_S)
            for pid, size in private_mb([os.getpid(), *descendants(os.getpid())]).items():
                self._peaks[pid] = max(size, self._peaks.get(pid, 0.0))
            if is_over:
                return


def private_mb(pids: Sequence[int]) -> dict[int, float]:
    """Return the megabytes that each process shares with no other."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found[pid] = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    return found


def plan_of(rollouts: str, tokenizer: str, vocab_size: int, *overrides: str) -> Plan:
    """Return the plan of a run with these ``rollouts``, on two simulated hosts with two engines each.

    It predicts the speed of paced engines, which read prompts in no time.
    """
    figures = (
        "{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,"
        f" num_key_value_heads: 1, head_dim: 32, vocab_size: {vocab_size}, max_position_embeddings: 8192}}"
    )
    recipe = rlflow.load(
        [
            "recipe=dr_grpo_tiny",
            f"models.policy={{recipe: null, random_weights: true, {tokenizer}, dtype: float32}}",
            f"models.policy.architecture={figures}",
            f"roles.rollout={{engine: vllm, gpus: {ENGINES}, tensor_parallel_size: 1, colocate: []}}",
            "roles.actor.gpus=2",
            f"++graph.rollouts={rollouts}",
            "evaluation=null",
            *overrides,
        ]
    )
    instant = {"peak_tflops": 1e9, "memory_gb_s": 1e9, "decode_layer_s": 0.0, "call_s": 0.0, "pass_sample_s": 0.0}
    speed = Efficiency(**instant, decode_step_s=paced.STEP_S, decode_sequence_s=paced.EACH_S)
    with patch("rlflow.resources.planner.prediction.task_times.DEFAULT_NUM_SEQS", paced.SLOTS):
        return compile_recipe(recipe, load_cluster("2x3@cpu"), {"cpu": speed})


def plan_of_conversations() -> Plan:
    rollouts = (
        f"{{node: converse, role: rollout, group_size: 2, environment: 'benchmarks.service:Service',"
        f" options: {{num_turns: {TURNS}}}, max_turns: {TURNS}, turn_tokens: {MAX_TOKENS + 1},"
        f" max_tokens: {(TURNS + 1) * (MAX_TOKENS + 5)}, processes: {PROCESSES}}}"
    )
    return plan_of(rollouts, "characters: '0123456789+='", vocab_size=64)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of all runs."""
    yield plan_of_conversations()


def prompts(first: int, count: int) -> Prompts:
    numbers = np.arange(first, first + count)
    keys = np.stack([np.zeros(count, np.int64), numbers, np.zeros(count, np.int64)], axis=1)
    ids = Packed.from_rows(np.ones((count, 16)), np.int32)
    return Prompts(keys=keys, ids=ids, rows=tuple({"number": number} for number in numbers.tolist()))


def measure(plan: Plan, count: int, samples: Callable[[int, int], Prompts] = prompts) -> Measured:
    """Generate ``count`` conversations."""
    (sampling,) = (node.operation.sampling for node in plan.graph.nodes if node.operation.sampling)
    sampling = replace(sampling, group_size=1)
    models = models_in_use(plan.recipe)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("rlflow.runtime.ray.role_workers.EngineWorker", TurnWorker),
        RayRuntime().start(plan, models, Path(folder)) as engines,
        count_towards("rollouts"),
    ):
        engine: Any = engines["rollout"]
        engine.generate(samples(count, WARM_UP), sampling)
        usage = Usage([call.result() for call in engine.workers.call_all("pid")])
        with usage.watched(), engines.stream_to(Dropped(), "rollout"):
            start = time.perf_counter()
            conversations = engine.generate(samples(0, count), sampling)
            seconds = time.perf_counter() - start
        return Measured(seconds, conversations, usage.memory_mb(), usage.cpu_seconds())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    arguments = parser.parse_args()
    count = arguments.conversations
    measured = measure(plan_of_conversations(), count)
    seconds, conversations, memory = measured.seconds, measured.conversations, measured.memory_mb
    assert conversations.turn_rewards.lengths.tolist() == [TURNS] * count
    assert conversations.finished.all()
    # Turns and answers alternate, and the last answer is not read.
    tokens = conversations.turn.run_lengths.reshape(count, 2 * TURNS - 1)[:, ::2].astype(np.float64)
    delays = np.array([[service.delay(row, turn) for turn in range(TURNS)] for row in range(count)])
    schedule = (tokens, delays, ENGINES, paced.SLOTS, paced.token_seconds)
    ideal = simulate(*schedule)
    table = Table("schedule", "seconds", "of the ideal")
    named = {
        "bound": bound(*schedule),
        "ideal": ideal,
        "measured": seconds,
        "each turn waits for all": lock_step(*schedule),
    }
    for name, value in named.items():
        table.add_row(name, f"{value:.1f}", f"{ideal / value:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"mean answer {delays.mean():.2f} s, mean turn {tokens.mean():.0f} tokens")
    console.print("MB for conversations: " + ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(memory.items())))
    figures = {"share_of_ideal": ideal / seconds, "largest_process_mb": max(memory.values())}
    goals = {
        "share_of_ideal": Goal(f"at least {SHARE}", figures["share_of_ideal"] >= SHARE),
        "largest_process_mb": Goal(f"at most {LARGEST_MB:g}", figures["largest_process_mb"] <= LARGEST_MB),
    }
    return finish("conversations", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
