"""Measure how much slower vLLM is inside rlflow: ``python -m benchmarks.rollout_overhead [--json FILE]``.

A step of GRPO runs on Ray: vLLM generates, a trainer in another process of the same machine trains, weights are copied.
Its generation takes turns with two other processes, which have no rlflow around vLLM:

- *Alone* is the same engine, with the same seeds, logprobs and sampler. It must generate the same tokens.
- *Stock* is vLLM as its users run it, without seeds and logprobs. It generates other tokens, equally many per request.

Each turn gives the share of the loop in their speed; the figures are medians over turns. Each of the three starts when
all processes are idle, since stock vLLM keeps a core busy for a second after its last answer. The learning rate is so
small that the weights stay the same. Random weights give every token the same probability, so responses end by chance,
some early and some late.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.batch import Packed, Prompts
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.base import EngineSpec, sample_seed
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.serving.settings import engine_arguments, load_config, model_files, set_environment
from rlflow.runtime.engine_specs import spec_of
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.ray.runtime import RayRuntime


@dataclass(frozen=True)
class Case:
    name: str
    max_tokens: int
    characters: int
    """One in this many tokens ends a response."""
    turns: int


PROMPTS, GROUP_SIZE = 64, 8
CASES = (
    Case("short", max_tokens=64, characters=63, turns=7),
    Case("long", max_tokens=768, characters=383, turns=3),
)
GOALS = {"alone": 0.9, "stock": 0.95}
# Processes are idle that take less than this share of a core in so many seconds; Ray's take about 0.04 at all times.
_IDLE_SHARE, _IDLE_S, _MOST_SECONDS = 0.1, 0.5, 30


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
            "roles.actor.optimizer={learning_rate: 1.0e-12}",
            f"data.batch_size={PROMPTS}",
            f"graph.rollouts={{group_size: {GROUP_SIZE}, max_tokens: {case.max_tokens}}}",
        ]
    )
    return rlflow.compile(recipe, "1x1@cpu")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs."""
    yield from map(plan_of, CASES)


def vllm_alone(spec: EngineSpec, sampling: dict[str, Any], connection: Connection) -> None:
    """Answer each list of prompts and seeds with the generated token ids and the seconds that they took."""
    set_environment(spec)
    from vllm import LLM, SamplingParams

    with model_files(spec) as folder:
        engine = LLM(**engine_arguments(spec, folder, load_config(spec.model_name, folder)))
    engine.collective_rpc("prepare_sampler")
    connection.send(None)
    while (work := connection.recv()) is not None:
        prompts, seeds = work
        began = time.perf_counter()
        params = [
            SamplingParams(seed=seed >> 1, detokenize=False, logprobs=0, flat_logprobs=True, **sampling)
            for seed in seeds
        ]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        connection.send(([list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - began))


def stock_vllm(spec: EngineSpec, connection: Connection) -> None:
    """Answer each list of prompts and lengths of responses with the seconds that these took."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    with model_files(spec) as folder:
        arguments = engine_arguments(spec, folder, load_config(spec.model_name, folder))
        same = ("dtype", "max_model_len", "max_num_seqs", "enforce_eager", "kv_cache_memory_bytes")
        engine = LLM(model=folder, **{name: arguments[name] for name in same})
    connection.send(None)
    while (work := connection.recv()) is not None:
        prompts, lengths = work
        began = time.perf_counter()
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        connection.send(time.perf_counter() - began)
    # vLLM's engine is a process of its own. Without this, the program would wait for it.
    engine.llm_engine.engine_core.shutdown()


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[Connection]:
    """Start a process, and yield the pipe to it once it has answered."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=target, args=(*arguments, there))
    started.start()
    assert here.poll(300), "vLLM did not start"
    here.recv()
    yield here
    here.send(None)
    started.join(60)


def wait_until_idle() -> None:
    """Wait until the processes below this one are idle."""
    for _ in range(int(_MOST_SECONDS / _IDLE_S)):
        before = _cpu_seconds()
        time.sleep(_IDLE_S)
        if _cpu_seconds() - before < _IDLE_SHARE * _IDLE_S:
            return
    raise RuntimeError(f"processes of the benchmark are still busy after {_MOST_SECONDS} s")


def _cpu_seconds() -> float:
    """Return the CPU time of the processes below this one."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def ask(connection: Connection, *work: Any) -> Any:
    wait_until_idle()
    connection.send(work)
    assert connection.poll(600), "vLLM does not answer"
    return connection.recv()


def requests(prompts: Prompts, seed: int) -> tuple[list[list[int]], list[int]]:
    samples = prompts.repeat(GROUP_SIZE)
    return [samples.ids[row].tolist() for row in range(len(samples))], [sample_seed(seed, key) for key in samples.keys]


def seconds_of(case: Case) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of each turn in the loop, alone and stock, and the tokens of each turn."""
    plan = plan_of(case)
    models = models_in_use(plan.recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    data_options = plan.recipe.data
    data = open_training_data(data_options, tokenizer, load_rows(data_options, "split"), 0)
    spec = spec_of(plan, "rollout", models["policy"], device="cpu")
    sampling = {"max_tokens": case.max_tokens, "stop_token_ids": [tokenizer.eos_token_id], "ignore_eos": True}
    seconds: dict[str, list[float]] = {"in the loop": [], "alone": [], "stock": []}
    tokens = []
    with (
        tempfile.TemporaryDirectory() as folder,
        process(vllm_alone, spec, sampling) as alone,
        process(stock_vllm, spec) as stock,
        RayRuntime().start(plan, models, Path(folder)) as engines,
    ):
        for step in range(case.turns + 1):
            prompts = data.prompts(step)
            if step == 0:  # to warm up
                prompts = prompts.take(np.arange(4))
            outputs: dict[str, Any] = {}
            wait_until_idle()
            nodes = GraphRunner(plan.graph, engines).run(plan.graph, {"prompts": prompts}, outputs.__setitem__)
            engines["rollout"].load_weights(engines["actor"].weights(), step + 1)
            response_ids: Packed = outputs["rollouts"].response_ids
            texts, seeds = requests(prompts, plan.recipe.seed)
            ids, alone_seconds = ask(alone, texts, seeds)
            assert np.array_equal(np.concatenate(ids), response_ids.values), "both must generate the same tokens"
            stock_seconds = ask(stock, texts, response_ids.lengths.tolist())
            if step:
                for name, value in zip(seconds, (nodes["rollouts"], alone_seconds, stock_seconds), strict=True):
                    seconds[name].append(value)
                tokens.append(len(response_ids.values))
    return seconds, tokens


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and the least and the greatest value."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    table = Table("case", "mean tokens", "turns", "vLLM", "tokens/s", "share of the loop")
    figures, goals = {}, {}
    for case in CASES:
        seconds, tokens = seconds_of(case)
        mean = f"{sum(tokens) / (case.turns * PROMPTS * GROUP_SIZE):.0f}"
        for name, own in seconds.items():
            shares = [other / loop for other, loop in zip(own, seconds["in the loop"], strict=True)]
            rates = [count / value for count, value in zip(tokens, own, strict=True)]
            table.add_row(case.name, mean, str(case.turns), name, spread(rates, 0), spread(shares, 2))
            if name in GOALS:
                figure = f"in_loop_over_{name}_{case.name}"
                figures[figure] = median(shares)
                goals[figure] = Goal(f"at least {GOALS[name]}", figures[figure] >= GOALS[name])
    Console().print(table)
    return finish("rollout_overhead", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
