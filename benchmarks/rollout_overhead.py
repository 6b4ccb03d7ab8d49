"""Measure how much slower vLLM is inside rlflow than alone: ``python -m benchmarks.rollout_overhead [--json FILE]``.

A step of GRPO runs on Ray: vLLM generates, a trainer in another process of the same machine trains, weights are copied.
The time of generation is compared with vLLM alone, which receives the same requests with the same seeds in a process
without rlflow, in turn with the steps. The learning rate is so small that both generate the same tokens, which is
checked. Random weights give every token the same probability, so responses end by chance, some early and some late.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.batch import Packed, Prompts
from rlflow.compiler.lower import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.source import load_rows, open_training_data
from rlflow.engines.base import EngineSpec, sample_seed
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.serving.settings import engine_arguments, load_config, model_files, set_environment
from rlflow.runtime.ray.engine_specs import spec_of
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.step import run_graph


@dataclass(frozen=True)
class Case:
    name: str
    max_tokens: int
    characters: int
    """One in this many tokens ends a response."""
    prompts: int
    steps: int


GROUP_SIZE = 8
CASES = (
    Case("short", max_tokens=64, characters=63, prompts=32, steps=6),
    Case("long", max_tokens=2048, characters=1023, prompts=8, steps=2),
)


def plan_of(case: Case) -> Plan:
    # Digits for the prompts, and enough other characters to make responses long.
    characters = "0123456789+=" + "".join(chr(0x4E00 + index) for index in range(case.characters - 12))
    figures = (
        "{model_type: qwen3, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 4, num_attention_heads: 4,"
        f" num_key_value_heads: 2, head_dim: 64, vocab_size: {case.characters + 1},"
        f" max_position_embeddings: {case.max_tokens + 32}}}"
    )
    recipe = rlflow.load(
        [
            "recipe=grpo_tiny",
            f"models.policy={{recipe: null, random_weights: true, characters: '{characters}', dtype: float32}}",
            f"models.policy.architecture={figures}",
            "roles.rollout.engine=vllm",
            "roles.actor.optimizer={learning_rate: 1.0e-30}",
            f"data.batch_size={case.prompts}",
            f"graph.rollouts={{group_size: {GROUP_SIZE}, max_tokens: {case.max_tokens}}}",
        ]
    )
    return rlflow.compile(recipe, "1x1@cpu")


def vllm_alone(spec: EngineSpec, sampling: dict[str, float], connection: Connection) -> None:
    """Answer each list of prompts and seeds with the generated token ids and the seconds that they took."""
    set_environment(spec)
    from vllm import LLM, SamplingParams

    with model_files(spec) as folder:
        arguments = engine_arguments(spec, folder, load_config(spec.model_name, folder))
        del arguments["worker_extension_cls"]
        engine = LLM(**arguments)
    connection.send(None)
    while (work := connection.recv()) is not None:
        prompts, seeds = work
        began = time.perf_counter()
        params = [SamplingParams(seed=seed >> 1, detokenize=False, logprobs=0, **sampling) for seed in seeds]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        connection.send(([list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - began))


def requests(prompts: Prompts, seed: int) -> tuple[list[list[int]], list[int]]:
    samples = prompts.repeat(GROUP_SIZE)
    return [samples.ids[row].tolist() for row in range(len(samples))], [sample_seed(seed, key) for key in samples.keys]


def seconds_of(case: Case) -> tuple[Sequence[float], Sequence[float], int]:
    """Return the seconds of each step in the loop and alone, and the tokens of all steps, without the first."""
    plan = plan_of(case)
    models = models_in_use(plan.recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    data_options = plan.recipe.data
    data = open_training_data(data_options, tokenizer, load_rows(data_options, "split"), 0, with_responses=False)
    spec = spec_of(plan, "rollout", models["policy"], device="cpu")
    here, there = multiprocessing.get_context("spawn").Pipe()
    sampling = {"max_tokens": case.max_tokens, "stop_token_ids": [tokenizer.eos_token_id], "ignore_eos": True}
    alone = multiprocessing.get_context("spawn").Process(target=vllm_alone, args=(spec, sampling, there), daemon=True)
    alone.start()
    assert here.poll(300), "vLLM did not start"
    here.recv()
    in_loop, by_itself, tokens = [], [], 0
    with tempfile.TemporaryDirectory() as folder, RayRuntime().start(plan, models, Path(folder)) as engines:
        for step in range(case.steps + 1):
            prompts = data.prompts(step)
            outputs: dict[str, Any] = {}
            seconds = run_graph(plan.graph, engines, {"prompts": prompts}, outputs.__setitem__)
            engines["rollout"].load_weights(engines["actor"].weights(), step + 1)
            here.send(requests(prompts, plan.recipe.seed))
            assert here.poll(600), "vLLM does not answer"
            ids, alone_seconds = here.recv()
            written: Packed = outputs["rollouts"].response_ids
            assert np.array_equal(np.concatenate(ids), written.values), "both must generate the same tokens"
            if step:
                in_loop.append(seconds["rollouts"])
                by_itself.append(alone_seconds)
                tokens += len(written.values)
    here.send(None)
    alone.join(60)
    return in_loop, by_itself, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    table = Table("case", "limit", "mean tokens", "steps", "alone tokens/s", "in the loop tokens/s", "share")
    figures = {}
    for case in CASES:
        in_loop, alone, tokens = seconds_of(case)
        share = sum(alone) / sum(in_loop)
        figures[f"in_loop_over_alone_{case.name}"] = share
        written = tokens / (case.steps * case.prompts * GROUP_SIZE)
        speeds = (f"{tokens / sum(alone):.0f}", f"{tokens / sum(in_loop):.0f}")
        table.add_row(case.name, str(case.max_tokens), f"{written:.0f}", str(case.steps), *speeds, f"{share:.2f}")
    Console().print(table)
    goals = {name: Goal("at least 0.9", share >= 0.9) for name, share in figures.items()}
    return finish("rollout_overhead", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
