"""Compare vLLM inside rlflow with vLLM alone on long-tailed responses.

``python -m benchmarks.long_generation [--json FILE]``

Two vLLM engines on this machine's CPU generate responses that end by chance, so most are short and a few very long.
Each engine has fewer slots than its share of samples, so new samples fill the slots that short ones leave.

- In the loop, rlflow's controller dispatches the samples through Ray.
- Alone, each of two processes with only vLLM receives half of the same requests at once. The halves have equally many
  tokens, which nobody could know in advance.
- Pinned, each engine of rlflow is called once, with its half of the batch in the order of the data.

The figures are tokens per second of both engines until the last sample is complete, the median of several turns. All
generate the same tokens, which is checked: those of samples that the loop migrates to the other engine, too.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from benchmarks.rollout_overhead import vllm_alone
from rlflow.batch import Prompts, Rollouts
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.source import load_rows, open_training_data
from rlflow.engines.base import EngineSpec, Sampling, sample_seed
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.ray import engine_specs as specs
from rlflow.runtime.ray.role_proxy import RoleProxy
from rlflow.runtime.ray.runtime import RayRuntime

ENGINES, GROUP_SIZE, PROMPTS, PLACES = 2, 8, 24, 32
MAX_TOKENS = 1536
# One in this many tokens ends a response.
CHARACTERS = 255
TURNS = 7
SAMPLING = Sampling(max_tokens=MAX_TOKENS, group_size=GROUP_SIZE)

Ints = NDArray[np.int64]


def plan_of() -> Plan:
    # Digits for the prompts, and enough other characters to make responses long.
    characters = "0123456789+=" + "".join(chr(0x4E00 + index) for index in range(CHARACTERS - 12))
    figures = (
        "{model_type: qwen3, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 4, num_attention_heads: 4,"
        f" num_key_value_heads: 2, head_dim: 64, vocab_size: {CHARACTERS + 1},"
        f" max_position_embeddings: {MAX_TOKENS + 32}}}"
    )
    recipe = rlflow.load(
        [
            "recipe=grpo_tiny",
            f"models.policy={{recipe: null, random_weights: true, characters: '{characters}', dtype: float32}}",
            f"models.policy.architecture={figures}",
            "roles.rollout.engine=vllm",
            f"roles.rollout.gpus={ENGINES}",
            "roles.rollout.tensor_parallel_size=1",
            f"data.batch_size={PROMPTS}",
            f"graph.rollouts={{group_size: {GROUP_SIZE}, max_tokens: {MAX_TOKENS}}}",
        ]
    )
    return rlflow.compile(recipe, f"1x{ENGINES}@cpu")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of both engines."""
    yield plan_of()


@contextmanager
def alone(spec: EngineSpec, end_id: int) -> Iterator[list[Connection]]:
    """Start processes with only vLLM, one core each."""
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    sampling = {"max_tokens": MAX_TOKENS, "stop_token_ids": [end_id], "ignore_eos": True}
    pipes = [context.Pipe() for _ in range(ENGINES)]
    started = [context.Process(target=vllm_alone, args=(spec, sampling, there), daemon=True) for _, there in pipes]
    for process in started:
        process.start()
    del os.environ["OMP_NUM_THREADS"]
    ours = [here for here, _ in pipes]
    for here in ours:
        assert here.poll(300), "vLLM did not start"
        here.recv()
    yield ours
    for here in ours:
        here.send(None)
    for process in started:
        process.join(60)


def requests(prompts: Prompts, seed: int) -> tuple[list[list[int]], list[int]]:
    samples = prompts.repeat(GROUP_SIZE)
    return [samples.ids[row].tolist() for row in range(len(samples))], [sample_seed(seed, key) for key in samples.keys]


def run_alone(pipes: Sequence[Connection], prompts: Prompts, halves: Sequence[Ints], seed: int) -> tuple[Any, float]:
    """Return the tokens of each half, and the seconds until both are complete."""
    began = time.perf_counter()
    for here, half in zip(pipes, halves, strict=True):
        here.send(requests(prompts.take(half), seed))
    assert all(here.poll(600) for here in pipes), "vLLM does not answer"
    tokens = [here.recv()[0] for here in pipes]
    return tokens, time.perf_counter() - began


def run_in_loop(engine: RoleProxy, prompts: Prompts) -> tuple[Rollouts, float]:
    began = time.perf_counter()
    rollouts = engine.generate(prompts, SAMPLING)
    return rollouts, time.perf_counter() - began


def run_pinned(engine: RoleProxy, prompts: Prompts) -> tuple[Rollouts, float]:
    began = time.perf_counter()
    whole, halves = SharedBatch(prompts), np.array_split(np.arange(len(prompts)), ENGINES)
    calls = [engine.workers.submit(rank, "generate", whole.slice(half), SAMPLING) for rank, half in enumerate(halves)]
    return Rollouts.concatenate(wait_all(calls)), time.perf_counter() - began


def even_halves(tokens: Ints) -> list[Ints]:
    """Split prompts with these numbers of tokens into sets of nearly equal sums, greedily from the longest."""
    halves: list[list[int]] = [[] for _ in range(ENGINES)]
    for prompt in np.argsort(-tokens, kind="stable").tolist():
        min(halves, key=lambda half: int(tokens[half].sum())).append(prompt)
    return [np.array(sorted(half)) for half in halves]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    specs._MAX_SEQUENCES = PLACES
    plan = plan_of()
    models = models_in_use(plan.recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    options = plan.recipe.data
    data = open_training_data(options, tokenizer, load_rows(options, "split"), 0)
    prompts, seed = data.prompts(0), plan.recipe.seed
    spec = specs.spec_of(plan, "rollout", models["policy"], device="cpu")
    rates: dict[str, list[float]] = {"in the loop": [], "pinned": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder, RayRuntime().start(plan, models, Path(folder)) as engines:
        engine: Any = engines["rollout"]
        with alone(spec, tokenizer.eos_token_id) as pipes:
            warm = prompts.take(np.arange(2))
            for run in (run_in_loop, run_pinned):
                run(engine, warm)
            run_alone(pipes, warm, [np.array([0]), np.array([1])], seed)
            pinned, _ = run_pinned(engine, prompts)
            lengths, same = pinned.response_ids.lengths, pinned.response_ids.values.tolist()
            halves = even_halves(lengths.reshape(-1, GROUP_SIZE).sum(1))
            for _ in range(TURNS):
                rollouts, took = run_in_loop(engine, prompts)
                rates["in the loop"].append(len(rollouts.response_ids.values) / took)
                assert rollouts.keys.tolist() == pinned.keys.tolist(), "every sample must be generated"
                assert rollouts.response_ids.values.tolist() == same, "all must generate the same tokens"
                pinned, took = run_pinned(engine, prompts)
                rates["pinned"].append(len(same) / took)
                tokens, took = run_alone(pipes, prompts, halves, seed)
                rates["alone"].append(len(same) / took)
                assert pinned.response_ids.values.tolist() == same, "all must generate the same tokens"
                rows = np.concatenate([half[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE) for half in halves]).ravel()
                in_order = [ids for _, ids in sorted(zip(rows.tolist(), chain(*tokens), strict=True))]
                assert np.concatenate(in_order).tolist() == same, "all must generate the same tokens"
    table = Table("engines", "tokens/s", "tokens/s, all turns", title=f"{len(lengths)} samples, {len(same)} tokens")
    for name, found in rates.items():
        table.add_row(name, f"{median(found):.0f}", ", ".join(f"{rate:.0f}" for rate in found))
    Console().print(table)
    quantiles = ", ".join(f"p{q} {np.percentile(lengths, q):.0f}" for q in (10, 50, 90, 99, 100))
    print(f"tokens of a response: mean {lengths.mean():.0f}, {quantiles}; {PLACES} slots per engine")
    figures = {
        "in_loop_over_alone": median(rates["in the loop"]) / median(rates["alone"]),
        "pinned_over_alone": median(rates["pinned"]) / median(rates["alone"]),
    }
    goals = {
        "in_loop_over_alone": Goal("at least 0.9", figures["in_loop_over_alone"] >= 0.9),
        "pinned_over_alone": Goal("for comparison", True),
    }
    return finish("long_generation", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
