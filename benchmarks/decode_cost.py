"""Measure what a sequence costs in a decoding step: ``python -m benchmarks.decode_cost [--json FILE]``.

The model has one layer of little width, so most of a step is the work of the host for each sequence: scheduling,
sampling, and collecting tokens and logprobs. rlflow's engine generates as in a run, by a session over its batching
thread. Stock vLLM's ``LLM.generate`` has the same arguments and asks for the same logprobs, but has no seeds for its
samples. Each is a process with one thread for arithmetic, and they take turns. The figures are medians over turns of
rlflow's time over stock vLLM's in the same turn.
"""

import argparse
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import Goal, finish
from benchmarks.rollout_overhead import ask, process, spread
from rlflow.batch import Packed, Prompts
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.serving.sessions import pack_rows
from rlflow.engines.serving.settings import engine_arguments, load_config, model_files, set_environment
from rlflow.engines.vllm import VllmEngine
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

SEQUENCES, GROUP_SIZE, TURNS = (256, 1024), 8, 5
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 64
MOST = 1.1
"""The most of each figure."""

CHARACTERS = "0123456789+="
ARCHITECTURE = Architecture(
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=64,
    max_position_embeddings=PROMPT_TOKENS + RESPONSE_TOKENS,
    tie_word_embeddings=True,
)
SPEC = EngineSpec(
    role="rollout",
    model_name="policy",
    model=Model(architecture=ARCHITECTURE, random_weights=True, characters=CHARACTERS, dtype="float32"),
    capabilities=frozenset({"Generates"}),
    device="cpu",
    seed=0,
    steps=1,
    layout=Layout(micro_batch_tokens=1),
    max_num_seqs=max(SEQUENCES),
    max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
)


def rlflow_engine(connection: Connection) -> None:
    """Answer each number of sequences with the seconds that rlflow's engine takes for them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    engine = VllmEngine(SPEC)
    # Every response has all of its tokens.
    engine._end_ids = []
    sampling = Sampling(max_tokens=RESPONSE_TOKENS, group_size=GROUP_SIZE)

    def generate(num_sequences: int) -> int:
        prompts = _prompts(num_sequences // GROUP_SIZE)
        keys = np.array([[0, prompt, 0] for prompt in range(len(prompts))], np.int64)
        ids = Packed.from_rows(prompts, np.int32)
        engine.begin_session(Prompts(keys=keys, ids=ids, rows=({},) * len(prompts)), sampling)
        rows, num_done = pack_rows(range(num_sequences)), 0
        while num_done < num_sequences:
            progress, rows = engine.advance(rows, 1), b""
            num_done += len(np.frombuffer(progress.rows, np.int32))
        rollouts = engine.finish_session()
        assert rollouts is not None
        return len(rollouts.response_ids.values)

    _serve(generate, connection)


def stock_vllm(connection: Connection) -> None:
    """Answer each number of sequences with the seconds that ``LLM.generate`` takes for them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    set_environment(SPEC)
    from vllm import LLM, SamplingParams

    with model_files(SPEC) as folder:
        arguments = engine_arguments(SPEC, folder, load_config("policy", folder))
        del arguments["worker_extension_cls"]
        engine = LLM(**arguments)
    params = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)

    def generate(num_sequences: int) -> int:
        prompts = [
            {"prompt_token_ids": ids} for ids in _prompts(num_sequences // GROUP_SIZE) for _ in range(GROUP_SIZE)
        ]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    _serve(generate, connection)


def _serve(generate: Callable[[int], int], connection: Connection) -> None:
    generate(GROUP_SIZE)
    connection.send(None)
    while (work := connection.recv()) is not None:
        (num_sequences,) = work
        wall, cpu = time.perf_counter(), time.process_time()
        num_tokens = generate(num_sequences)
        connection.send((time.perf_counter() - wall, time.process_time() - cpu))
        assert num_tokens == num_sequences * RESPONSE_TOKENS


def _prompts(number: int) -> list[list[int]]:
    draw = np.random.default_rng(number)
    ids: list[list[int]] = draw.integers(1, len(CHARACTERS), (number, PROMPT_TOKENS)).tolist()
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    table = Table("sequences", "", "us a sequence and step", "of CPU time", "CPU time over stock")
    figures, goals = {}, {}
    with process(rlflow_engine) as ours, process(stock_vllm) as stock:
        for num_sequences in SEQUENCES:
            turns = [(ask(ours, num_sequences), ask(stock, num_sequences)) for _ in range(TURNS)]
            micros = 1e6 / (num_sequences * RESPONSE_TOKENS)
            cpu_ratios = [our_cpu / stock_cpu for (_, our_cpu), (_, stock_cpu) in turns]
            for name, seconds in (("rlflow", [ours for ours, _ in turns]), ("stock", [stock for _, stock in turns])):
                wall, cpu = ([value * micros for value in values] for values in zip(*seconds, strict=True))
                share = spread(cpu_ratios, 2) if name == "rlflow" else ""
                table.add_row(str(num_sequences), name, spread(wall, 1), spread(cpu, 1), share)
            figure = f"decode_cost_over_stock_{num_sequences}"
            figures[figure] = median(our_wall / stock_wall for (our_wall, _), (stock_wall, _) in turns)
            goals[figure] = Goal(f"at most {MOST}", figures[figure] <= MOST)
    Console().print(table)
    return finish("decode_cost", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
