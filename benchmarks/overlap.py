"""Measure what generation ahead of training brings: ``python -m benchmarks.overlap [--real] [--json FILE]``.

Runs on Ray have two engines that generate and one that trains, or two that take turns with training. None has a model:
responses take the time of their decoding steps, with lengths of a long-tailed distribution, and an optimizer step takes
a fixed time. Everything between them is rlflow's: scheduling, interruptions, object stores, weight syncs. Each run is
compared with the planner's simulation of the same engines.

``--real`` adds runs with vLLM and DeepSpeed on a CPU host of this machine, with a model of random weights.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks import paced_engine as paced
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.report.records import MetricsWriter
from rlflow.resources.planner.prediction.overlap import Decoding, simulate_overlap, simulate_turns
from rlflow.resources.workload import Overlap
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run

PROMPTS, GROUP_SIZE, ENGINES = 32, 8, 2
# Steps of a run, and the first of them that do not count: the pipeline fills.
STEPS, WARM_UP = 9, 3
_KEEP = "in_flight: keep, deterministic: false"
CASES = {
    "synchronous": "{max_staleness: 0}",
    "one step off, deterministic": "{max_staleness: 1}",
    "one step off": f"{{max_staleness: 1, {_KEEP}}}",
    "k = 2": f"{{max_staleness: 2, {_KEEP}}}",
    "k = 8": f"{{max_staleness: 8, {_KEEP}}}",
}
SHARED_CASES = {
    "shared GPUs, synchronous": "{max_staleness: 0}",
    "shared GPUs, k = 2, wait": "{max_staleness: 2}",
    "shared GPUs, k = 2, keep": f"{{max_staleness: 2, {_KEEP}}}",
}
APART = (f"roles.rollout={{gpus: {ENGINES}, colocate: []}}", "roles.actor.gpus=1")
SHARED = (f"roles.rollout={{gpus: {ENGINES}, colocate: [actor]}}", f"roles.actor.gpus={ENGINES}")
ERROR, SHARE = 0.05, 0.9


def plan_of(overlap: str, *overrides: str, cluster: str = "1x3@cpu") -> Plan:
    figures = (
        "{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,"
        " num_key_value_heads: 1, head_dim: 32, vocab_size: 64, max_position_embeddings: 2048}"
    )
    recipe = rlflow.load(
        [
            "recipe=dr_grpo_tiny",
            "models.policy={recipe: null, random_weights: true, characters: '0123456789+=', dtype: float32}",
            f"models.policy.architecture={figures}",
            "roles.rollout.engine=vllm",
            f"data.batch_size={PROMPTS}",
            f"graph.rollouts={{group_size: {GROUP_SIZE}, max_tokens: {paced.LIMIT}}}",
            f"steps={STEPS}",
            f"overlap={overlap}",
            "evaluation=null",
            "checkpoints.every=1000",
            "graph.update.num_minibatches=1",
            *overrides,
        ]
    )
    return rlflow.compile(recipe, cluster)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with a paced engine, and of those with vLLM."""
    yield from (plan_of(overlap, *APART) for overlap in CASES.values())
    yield from (plan_of(overlap, *SHARED) for overlap in SHARED_CASES.values())
    yield from real_plans()


def real_plans() -> Iterator[Plan]:
    """Yield the plans of a synchronous and of an overlapped run with vLLM and DeepSpeed on two hosts."""
    for overlap in (CASES["synchronous"], CASES["k = 2"]):
        pins = ("roles.rollout.colocate=[]", "roles.actor.engine=deepspeed", "graph.rollouts.max_tokens=256")
        yield plan_of(overlap, *pins, cluster="2x1@cpu")


def metrics_of(plan: Plan) -> list[dict[str, float]]:
    """Return the metrics of each step of a run, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        run(plan, Path(folder), RayRuntime(), [MetricsWriter()])
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "seconds" in line][WARM_UP:]


def measured(plan: Plan) -> dict[str, float]:
    """Return the mean seconds of a step, and the mean of its other figures."""
    steps = metrics_of(plan)
    return {name: fmean(line[name] for line in steps) for name in steps[0] if all(name in line for line in steps)}


def predicted(overlap: Overlap, sync: float, *, takes_turns: bool) -> float:
    """Return the predicted seconds of a step."""
    decoding = Decoding(
        samples=PROMPTS * GROUP_SIZE,
        slots=paced.SLOTS * ENGINES,
        lengths=paced.LENGTHS,
        token_seconds=lambda running: paced.token_seconds(max(1.0, running / ENGINES)),
        prefill=0.0,
        prefill_token=0.0,
    )
    simulate = simulate_turns if takes_turns else simulate_overlap
    return simulate(decoding, paced.TRAIN_S, sync, overlap).step_seconds


def bound(*, takes_turns: bool) -> float:
    """Return the seconds of a step that no overlap can beat: training, and generation with every slot in use.

    Where they share GPUs, it is the sum of both; otherwise the longer one.
    """
    tokens = PROMPTS * GROUP_SIZE * fmean(paced.LENGTHS)
    both = paced.TRAIN_S, tokens / (paced.SLOTS * ENGINES) * paced.token_seconds(paced.SLOTS)
    return sum(both) if takes_turns else max(both)


def real_over_synchronous() -> float:
    """Return how many times as many steps overlap makes in the same time, with vLLM and DeepSpeed on two hosts."""
    seconds = [measured(plan)["seconds"] for plan in real_plans()]
    print(f"vLLM and DeepSpeed: {seconds[0]:.2f} s synchronous, {seconds[1]:.2f} s with k = 2")
    return seconds[0] / seconds[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    table = Table("run", "step s", "predicted s", "error", "of the bound", "staleness", "idle: generate", "idle: train")
    errors, shares = [], {}
    for name, overlap in (CASES | SHARED_CASES).items():
        shared = name in SHARED_CASES
        plan = plan_of(overlap, *(SHARED if shared else APART))
        with patch("rlflow.runtime.ray.role_workers.EngineWorker", paced.PacedWorker):
            found = measured(plan)
        step = predicted(plan.recipe.overlap, found["seconds/copy"] * plan.steps_per_turn, takes_turns=shared)
        errors.append(abs(found["seconds"] / step - 1))
        shares[name] = bound(takes_turns=shared) / found["seconds"]
        print(f"{name}: {found['seconds']:.2f} s, predicted {step:.2f} s", flush=True)
        idle = [found.get(f"overlap/{side}_idle_seconds", 0.0) / found["seconds"] for side in ("generate", "train")]
        table.add_row(
            *(name, f"{found['seconds']:.2f}", f"{step:.2f}", f"{found['seconds'] / step - 1:+.1%}"),
            *(
                f"{shares[name]:.2f}",
                f"{found.get('overlap/staleness_mean', 0.0):.2f}",
                f"{idle[0]:.0%}",
                f"{idle[1]:.0%}",
            ),
        )
    Console(width=130).print(table)
    figures = {"prediction_error_max": max(errors), "share_of_bound_k2": shares["k = 2"]}
    goals = {
        "prediction_error_max": Goal(f"at most {ERROR}", max(errors) <= ERROR),
        "share_of_bound_k2": Goal(f"at least {SHARE}", shares["k = 2"] >= SHARE),
    }
    if arguments.real:
        figures["real_over_synchronous"] = real_over_synchronous()
        goals["real_over_synchronous"] = Goal("more than 1", figures["real_over_synchronous"] > 1)
    return finish("overlap", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
