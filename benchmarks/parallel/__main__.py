"""Compare ranks of the FSDP engine with one rank of torch in float32: whether they are exact, and what a step costs.

``python -m benchmarks.parallel [--json FILE] [--only PART_OF_A_NAME] [--seeds N]``

Every combination of replicas, shares of the data, parts of sequences and layers, and groups of experts on 2 and 4 ranks
(gloo, on CPUs) trains five tiny models for three AdamW steps of several passes. Half of them reduce gradients once a
step, half recompute layers, and rows are drawn by each of several seeds. A combination is exact where losses and the
first gradients differ by at most 1e-6, weights by 1e-5, and gradient norms by 1e-5 of their size. Engines with a
mistake must not be exact.

AdamW divides a gradient by its size. Where gradients cancel to 1e-9, the order in which float32 adds them decides the
step, so one rank that cuts its rows into other passes ends with other weights. Weights are therefore compared with the
range of what one rank computes with passes of several sizes; ``weight_spread`` is the largest of these ranges.
A step of two passes over four layers is counted in messages, and its CPU time compared with that of DeepSpeed's ZeRO 3.

Before its first step, each combination also gives away its weights in bfloat16, as a sync does, mostly in slices: they
must equal those of the model's file. The largest buffer of a sync is counted with the shapes of DeepSeek-V3;
``--only buffers`` measures just this.

A mixture of experts is sampled by vLLM and scored by the engine ``torch``, with the experts of the sampler (routing
replay) and without: the figures are percentile 99 of the difference of logprobs. ``--only replay`` measures just these.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch

from benchmarks.parallel.buffers import largest_buffer_mib
from benchmarks.parallel.cases import MODELS, STEPS, layouts, make_models, minibatch, shares, spec_of
from benchmarks.parallel.ranks import MISTAKES, Ranks, Result, cost, running, train, train_rank, weight_ranges
from benchmarks.parallel.replay import differences
from benchmarks.reporting import Goal, finish
from rlflow.engines.torch import TorchEngine
from rlflow.resources.layout import Layout

# Four groups of layers, embeddings and output layer are gathered twice in each of two passes, the last norm once.
MAX_GATHERS, MAX_REDUCTIONS = 26, 7
MAX_BUFFER_MIB = 256
# Tokens of a pass of one rank: ranks are compared with the first.
PASSES = (48, 500, 24, 13)
# With other experts in some layers, logprobs in bfloat16 differ by more than with the same; float32 by two units.
MAX_REPLAYED, MIN_WITHOUT, MAX_FLOAT32 = 0.02, 0.04, 1e-6


@dataclass
class Findings:
    """The results of a comparison."""

    count: int = 0
    """The number of combinations."""
    inexact: list[str] = field(default_factory=list)
    """The combinations that are not exact."""
    unnoticed: list[str] = field(default_factory=list)
    """The mistakes that were not noticed."""
    wrongly_sent: list[str] = field(default_factory=list)
    """Weights with other values in a sync than in their file."""
    weight_spread: float = 0.0
    """The largest difference between weights of one rank with passes of several sizes."""


def compare(folder: Path, ranks: Mapping[int, Ranks], only: str, seed: int, findings: Findings) -> None:
    """Train all combinations on the rows of a seed, and add what is found."""
    batches = [minibatch(step, seed) for step in range(STEPS)]
    for model in MODELS:
        alone: list[Result] = []
        for layout in layouts(model):
            degrees = ("data", "sequence", "tensor", "expert")
            sizes = tuple(getattr(layout, f"{way}_parallel_size") for way in degrees)
            name = f"{model} " + " x ".join(map(str, sizes)) + f", {layout.num_replicas} replicas"
            if only not in name:
                continue
            spec = spec_of(folder / model, layout)
            if not alone:
                of_one = [spec_of(folder / model, Layout(micro_batch_tokens=tokens)) for tokens in PASSES]
                alone = [train(TorchEngine(spec), batches) for spec in of_one]
                ranges = weight_ranges(alone)
                spread = max(float((highest - lowest).max()) for lowest, highest in ranges.values())
                findings.weight_spread = max(findings.weight_spread, spread)
            of_ranks = [list(parts) for parts in zip(*(shares(batch, layout) for batch in batches), strict=True)]
            group = ranks[layout.num_gpus]
            findings.count += 1
            result = group.call(train_rank, spec, of_ranks, "")[0]
            findings.wrongly_sent += [f"{name}: {weight}" for weight in result.wrongly_sent]
            if differences := result.differences(alone[0], ranges):
                findings.inexact.append(name)
                print(f"differs with seed {seed}: {name} in {differences}", flush=True)
            # Two mistakes show where ranks have different experts, and one where they have different heads.
            for mistake in MISTAKES.get(sizes, ()) if model in ("dense", "qwen3_moe") else ():
                if not group.call(train_rank, spec, of_ranks, mistake)[0].differences(alone[0], ranges):
                    findings.unnoticed.append(f"{name}: {mistake}")


def costs(folder: Path, ranks: Ranks) -> tuple[float, int, int]:
    """Return the CPU time of a step over that of DeepSpeed's ZeRO 3, and the step's gathers and reductions."""
    layout = Layout(micro_batch_tokens=13, data_parallel_size=4, zero_stage=3, gradient_checkpointing=True)
    batch = minibatch(0)
    parts = [batch.take(torch.arange(2 * rank, 2 * rank + 2).numpy()) for rank in range(4)]
    seconds = {}
    for name, of_engine in (("fsdp", {"num_replicas": 1, "reduces_once": True}), ("deepspeed", {})):
        spec = spec_of(folder / "dense", layout, dtype="bfloat16", **of_engine)
        answers = ranks.call(cost, spec, parts, name)
        seconds[name] = min(answer[0] for answer in answers)
        print(f"{name}: {seconds[name]:.3f} s of CPU, {answers[0][1]}")
        if name == "fsdp":
            messages = answers[0][1]
    return seconds["fsdp"] / seconds["deepspeed"], messages["allgather"], messages["reduce"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="combinations with this in their name")
    parser.add_argument("--seeds", type=int, default=2, help="number of draws of the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import deepspeed  # noqa: F401 # the ranks are forked, and need not import it again

    with tempfile.TemporaryDirectory() as temporary, running() as ranks:
        folder = Path(temporary)
        make_models(folder)
        findings = Findings()
        for seed in range(arguments.seeds):
            compare(folder, ranks, arguments.only, seed, findings)
        ratio, gathers, reductions = costs(folder, ranks[4])
        buffer = largest_buffer_mib() if arguments.only in "buffers" else 0.0
        replayed = differences(folder) if arguments.only in "replay" else {}
    for name in findings.wrongly_sent:
        print("not as in its file:", name)
    for name in findings.unnoticed:
        print("not noticed:", name)
    figures = {
        "combinations": findings.count,
        "inexact": len(findings.inexact),
        "unnoticed": len(findings.unnoticed),
        "wrongly_sent": len(findings.wrongly_sent),
        "weight_spread": findings.weight_spread,
        "cpu_over_zero3": ratio,
        "gathers": gathers,
        "reductions": reductions,
    }
    goals = {
        "combinations": Goal("at least 1", findings.count >= 1 or arguments.only in ("replay", "buffers")),
        "inexact": Goal("none", not findings.inexact),
        "unnoticed": Goal("none", not findings.unnoticed),
        "wrongly_sent": Goal("none", not findings.wrongly_sent),
        "weight_spread": Goal("any", True),
        "cpu_over_zero3": Goal("at most 0.5", ratio <= 0.5),
        "gathers": Goal(f"at most {MAX_GATHERS}", gathers <= MAX_GATHERS),
        "reductions": Goal(f"at most {MAX_REDUCTIONS}", reductions <= MAX_REDUCTIONS),
    }
    if buffer:
        figures["largest_buffer_mib"] = buffer
        goals["largest_buffer_mib"] = Goal(f"at most {MAX_BUFFER_MIB}", buffer <= MAX_BUFFER_MIB)
    if replayed:
        figures |= {
            "replay_p99": replayed["bfloat16 with"],
            "replay_p99_without": replayed["bfloat16 without"],
            "replay_p99_float32": replayed["float32 with"],
        }
        goals |= {
            "replay_p99": Goal(f"at most {MAX_REPLAYED}", figures["replay_p99"] <= MAX_REPLAYED),
            "replay_p99_without": Goal(f"at least {MIN_WITHOUT}", figures["replay_p99_without"] >= MIN_WITHOUT),
            "replay_p99_float32": Goal(f"at most {MAX_FLOAT32}", figures["replay_p99_float32"] <= MAX_FLOAT32),
        }
    return finish("parallel", figures, goals, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
