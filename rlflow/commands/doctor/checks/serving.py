"""Checks of vLLM: sleeping frees its memory, waking restores it, and it shares a GPU with DeepSpeed in a whole run."""

import json
import tempfile
from pathlib import Path
from typing import Any

from rlflow.commands.calibrate.probes import run
from rlflow.commands.doctor.checks.models import HALF_BILLION, free_memory_in_another_process, prompts_of, spec_of
from rlflow.commands.doctor.finding import Finding
from rlflow.engines.base import Sampling
from rlflow.engines.registry import engine_kind
from rlflow.resources.layout import Layout
from rlflow.resources.memory.overheads import asleep_terms
from rlflow.resources.memory.state import total_gib
from rlflow.resources.models.architecture import Architecture

_UTILIZATION = 0.5
# A sleeping engine may keep this much more than planned, in GiB.
_TOLERANCE_GIB = 1.0

_STEPS = 3
# Sampler and trainer compute the same logprobs in bfloat16 with different kernels.
_SAMPLER_DIFFERENCE = 0.05
# The width of Qwen2.5-7B with a single layer: the embedding is a tensor of 1.09 GB.
_WIDE = (
    "model_type: qwen2, hidden_size: 3584, intermediate_size: 18944, num_hidden_layers: 1, num_attention_heads: 28, "
    "num_key_value_heads: 4, head_dim: 128, vocab_size: 152064, max_position_embeddings: 4096"
)


def sleep(
    device: str, *, architecture: Architecture = HALF_BILLION, prompts: int = 32, max_tokens: int = 64
) -> list[Finding]:
    """Generate, sleep, wake and generate again; the freed memory is measured from another process."""
    layout = Layout(micro_batch_tokens=8192, gpu_memory_utilization=_UTILIZATION, sleeps=device != "cpu")
    with free_memory_in_another_process(device) as free_gib:
        before = free_gib()
        spec = spec_of(architecture, layout, "Generates", device=device, max_model_len=16 + max_tokens)
        engine: Any = engine_kind("vllm").engine(spec)
        batch, sampling = prompts_of(prompts, 16), Sampling(max_tokens=max_tokens)
        first = engine.generate(batch, sampling)
        awake = free_gib()
        engine.sleep()
        asleep = free_gib()
        engine.wake()
        again = engine.generate(batch, sampling)
        num_equal = sum(one == other for one, other in zip(first.texts, again.texts, strict=True))
    findings = [
        Finding.compare(
            "vllm after sleep and wake: equal responses",
            f"{num_equal} of {prompts}",
            # Batches may form differently, and bfloat16 then rounds differently. Broken weights would leave none equal.
            f"at least {prompts // 2}",
            num_equal >= prompts // 2,
        )
    ]
    if device.startswith("cuda"):
        name = f"vllm asleep, {asleep - awake:.2f} GiB freed: memory kept, seen from another process"
        kept = total_gib(asleep_terms(architecture))
        findings.append(Finding.at_most(name, before - asleep, kept + _TOLERANCE_GIB, " GiB"))
    return findings


def colocated_run(
    device: str, *, cluster: str = "auto", architecture: str = _WIDE, seconds: float = 240
) -> list[Finding]:
    """Train a few steps of GRPO with vLLM and DeepSpeed on one GPU, with the same command that users type."""
    with tempfile.TemporaryDirectory() as folder:
        run(overrides(cluster, architecture), Path(folder), seconds)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "update/sampler_difference" in line]
    worst = max((abs(line["update/sampler_difference"]) for line in steps), default=float("inf"))
    what = "logprobs of sampler and trainer, mean difference"
    return [
        Finding.compare("colocated run", f"{len(steps)} steps", f"{_STEPS} steps", len(steps) == _STEPS),
        Finding.at_most(f"colocated run: {what}", worst, _SAMPLER_DIFFERENCE),
    ]


def overrides(cluster: str, architecture: str) -> list[str]:
    """Return the overrides of the run: ``grpo_tiny_cluster`` for a few steps, with a new model."""
    return [
        *("recipe=grpo_tiny_cluster", f"cluster={cluster}", f"steps={_STEPS}"),
        f"roles.actor.optimizer.warmup_steps={_STEPS}",
        *("evaluation=null", "checkpoints.every=1000", "~models.policy.recipe"),
        "models.policy={random_weights: true, characters: '0123456789+=', dtype: bfloat16, "
        f"architecture: {{{architecture}}}}}",
    ]
