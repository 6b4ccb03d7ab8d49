"""Measure how the memory of a step grows with batches and texts: ``python -m benchmarks.memory_scaling [--json FILE]``.

The model is small and has a vocabulary of 32,768, so that full logits would take most of the memory; it runs in float32
on a CPU. Prompts are half of a text, responses the other half, and a pass has the tokens of two texts.

The profiler records every allocation of torch, including those inside kernels. The figure is the peak during an update,
or during scoring, above the memory at its end (weights, optimizer, gradients, results). Then two ranks share a text
(sequence parallelism), each in its own process. Their memory for a short text, mostly DeepSpeed's buffers, is
subtracted from their peaks.
"""

import argparse
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.reporting import Goal, finish
from rlflow.batch import Minibatch, Packed, Repeated
from rlflow.engines.base import EngineSpec
from rlflow.engines.registry import engine_kind
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

# (tokens of a text, prompts, responses to each)
_CASES = [
    *((512, 1, group) for group in (4, 8, 16, 64)),
    (512, 4, 8),
    (2048, 1, 4),
    (2048, 1, 8),
    (8192, 1, 4),
    (8192, 1, 8),
]
_VOCABULARY = 32768
_SHARED = 8192
"""Tokens of the text that two ranks share."""
_SHORT = 64
_LOSS = PolicyUpdate().loss(1.0)
_ARCHITECTURE = Architecture(
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=_VOCABULARY,
    max_position_embeddings=8192,
)
_MODEL = Model(random_weights=True, characters="0123456789", architecture=_ARCHITECTURE, dtype="float32")


@dataclass(frozen=True)
class Peaks:
    """Bytes."""

    update: int
    scoring: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Keeps the profiler and the allocator from printing messages at every start.
    os.environ["KINETO_LOG_LEVEL"] = "6"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    table = Table("tokens of a text", "prompts", "group_size", "update", "scoring", "full logits of a pass")
    seen: dict[int, list[Peaks]] = {}
    over_logits = 0.0
    with multiprocessing.get_context("spawn").Pool(1) as process:
        for (tokens, prompts, group), peaks in zip(_CASES, process.imap(_alone, _CASES), strict=True):
            seen.setdefault(tokens, []).append(peaks)
            logits = tokens * _VOCABULARY * 4
            over_logits = max(over_logits, peaks.update / logits, peaks.scoring / logits)
            sizes = [f"{size / 2**20:.1f} MiB" for size in (peaks.update, peaks.scoring, logits)]
            table.add_row(str(tokens), str(prompts), str(group), *sizes)
    Console().print(table)
    growth = max(
        max(values) / min(values) - 1
        for peaks in seen.values()
        for values in ([each.update for each in peaks], [each.scoring for each in peaks])
    )
    ratios = {engine: _shared(engine) for engine in ("torch", "deepspeed")}
    for engine, ratio in ratios.items():
        print(f"{engine}: two ranks share a text of {_SHARED} tokens; each uses {ratio:.2f} of the memory of one alone")
    figures = {
        "growth_with_group_size": growth,
        "sp2_activation_ratio": max(ratios.values()),
        "peak_over_logits": over_logits,
    }
    goals = {
        "growth_with_group_size": Goal("at most 0.05", growth <= 0.05),
        "sp2_activation_ratio": Goal("at most 0.6", max(ratios.values()) <= 0.6),
        "peak_over_logits": Goal("below 1", over_logits < 1),
    }
    return finish("memory_scaling", figures, goals, json_file)


def _alone(case: tuple[int, int, int]) -> Peaks:
    """Return the peaks of one case, in its own process."""
    tokens, prompts, group = case
    engine: Any = engine_kind("torch").engine(_spec(Layout(micro_batch_tokens=2 * tokens)))
    batch = _batch(tokens, prompts, group)
    # The first update creates the optimizer's state.
    engine.update(_batch(_SHORT, 1, 1), _LOSS)
    engine._optimizer.zero_grad()
    return Peaks(
        update=_peak(lambda: engine.update(batch, _LOSS)),
        scoring=_peak(lambda: engine.logprobs(batch.as_sequences(), 1.0)),
    )


def _shared(engine: str) -> float:
    """Return the larger update peak of two ranks, relative to the peak of one rank alone."""
    peaks = []
    for size in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        with multiprocessing.get_context("spawn").Pool(size) as processes:
            ranks = [(engine, rank, size, address) for rank in range(size)]
            peaks.append(max(processes.map(_rank, ranks, chunksize=1)))
    return peaks[1] / peaks[0]


def _rank(place: tuple[str, int, int, str]) -> int:
    """Return the bytes of an update's peak that are due to the long text, in its own process."""
    engine, rank, size, address = place
    torch.set_num_threads(1)
    stage = 2 if engine == "deepspeed" else None
    layout = Layout(micro_batch_tokens=_SHARED, sequence_parallel_size=size, zero_stage=stage)
    of = replace(_spec(layout), rank=rank, world_size=size, address=address)
    built: Any = engine_kind(engine).engine(of)
    built.update(_batch(_SHORT, 1, 1), _LOSS)
    peaks = []
    for tokens in (_SHORT, _SHARED):
        batch = _batch(tokens, 1, 1)
        peaks.append(_peak(partial(built.update, batch, _LOSS)))
    return peaks[1] - peaks[0]


def _peak(work: Callable[[], object]) -> int:
    """Return the peak of allocated bytes above those at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = most = 0
    for size in _allocations(seen):
        held += size
        most = max(most, held)
    return most - held


def _allocations(seen: Any) -> Iterator[int]:
    """Yield allocated bytes, and freed bytes as negative numbers, in the order of time."""
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def _spec(layout: Layout) -> EngineSpec:
    return EngineSpec(
        role="actor",
        model_name="policy",
        model=_MODEL,
        capabilities=frozenset({"Trains", "Scores"}),
        device="cpu",
        seed=0,
        steps=1,
        layout=layout,
    )


def _batch(tokens: int, prompts: int, group: int) -> Minibatch:
    """Return texts with this many tokens, of which the first half is the prompt."""
    draw = np.random.default_rng(0)
    rows = prompts * group
    prompt_ids = Packed.from_rows(draw.integers(0, _VOCABULARY, (prompts, tokens // 2)), np.int32)
    response_ids = Packed.from_rows(draw.integers(0, _VOCABULARY, (rows, tokens // 2)), np.int32)
    zeros = response_ids.like(np.zeros(rows * (tokens // 2), np.float32))
    each = np.full(rows, 1 / (rows * (tokens // 2)), np.float32)
    return Minibatch(
        keys=np.array([[0, prompt, sample] for prompt in range(prompts) for sample in range(group)], np.int64),
        prompt_ids=prompt_ids.take(np.repeat(np.arange(prompts), group)),
        response_ids=response_ids,
        step=0,
        columns={"old_logprobs": zeros, "advantages": zeros},
        weights=Repeated(each, response_ids.lengths),
    )


if __name__ == "__main__":
    raise SystemExit(main())
