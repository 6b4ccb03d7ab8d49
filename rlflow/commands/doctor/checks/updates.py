"""Checks of training: the loss and peak memory of an update, and the memory that sleeping frees."""

import math
from typing import Any

import numpy as np

from rlflow.batch import Minibatch
from rlflow.commands.doctor.checks.models import (
    HALF_BILLION,
    FreeMemory,
    NegativeLogprob,
    free_memory_in_another_process,
    minibatch_of,
    spec_of,
)
from rlflow.commands.doctor.finding import Finding
from rlflow.compiler.models import training_memory
from rlflow.engines.base import Sleeps
from rlflow.engines.registry import engine_kind
from rlflow.recipe import Role
from rlflow.resources.layout import Layout
from rlflow.resources.memory.overheads import process_terms
from rlflow.resources.memory.phases import cached_gib, update_terms
from rlflow.resources.memory.state import TrainingMemory, total_gib
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import MEMORY_BANDS, kind_of

# Random weights give every token of the vocabulary nearly the same probability.
_LOSS_ERROR = 0.05
# Measured over planned memory. Much less wastes the GPU; more than the planner's own band runs out of memory.
_MIN_RATIO = 0.6
# A sleeping engine may keep this much besides what the plan counts for its process: cuBLAS has buffers.
_TOLERANCE_GIB = 0.5


def update(
    device: str,
    *,
    engine: str,
    zero_stage: int | None = None,
    num_replicas: int | None = None,
    architecture: Architecture = HALF_BILLION,
    rows: int = 4,
    prompt_tokens: int = 128,
    response_tokens: int = 896,
) -> list[Finding]:
    """Train two steps on one GPU; compare the loss with ln(vocabulary) and the memory with the plan.

    An engine that can sleep then sleeps and wakes: the freed memory is measured from another process.
    """
    sleeps = issubclass(engine_kind(engine).engine, Sleeps)
    layout = Layout(
        micro_batch_tokens=rows * (prompt_tokens + response_tokens),
        zero_stage=zero_stage,
        num_replicas=num_replicas,
        gradient_checkpointing=True,
        sleeps=sleeps,
    )
    with free_memory_in_another_process(device) as free_gib:
        before = free_gib()
        spec = spec_of(architecture, layout, "Trains", "Scores", device=device)
        trainer: Any = engine_kind(engine).engine(spec)
        minibatch = minibatch_of(rows, prompt_tokens, response_tokens)
        first, second = (trainer.update(minibatch, NegativeLogprob()).values["loss"] for _ in range(2))
        expected = math.log(architecture.vocab_size)
        label = engine if zero_stage is None or num_replicas else f"{engine} ZeRO {zero_stage}"
        findings = [
            Finding.at_most(
                f"update by {label}: loss {first:.3f}, relative error against ln(vocabulary)",
                abs(first - expected) / expected,
                _LOSS_ERROR,
            ),
            Finding.compare(f"update by {label}: second loss", f"{second:.4f}", f"below {first:.4f}", second < first),
        ]
        if device.startswith("cuda"):
            training = training_memory(Role(model="policy", engine=engine), spec.model)
            # torch keeps what it has reserved, so that the memory in use is that of the peak.
            findings.append(_memory(label, before - free_gib(), architecture, layout, training))
        if sleeps:
            findings += _sleep(label, device, trainer, minibatch, before, free_gib, layout)
    return findings


def _memory(
    label: str, measured: float, architecture: Architecture, layout: Layout, training: TrainingMemory
) -> Finding:
    tokens = layout.micro_batch_tokens
    planned = total_gib(update_terms(architecture, layout, training, tokens, accumulates=False))
    planned += cached_gib(architecture, layout, training, tokens, accumulates=False)
    max_ratio = MEMORY_BANDS[kind_of(layout, training)].high
    return Finding.compare(
        f"update by {label}: memory, seen from another process",
        f"{measured:.2f} GiB",
        f"{planned:.2f} GiB by the plan, within {_MIN_RATIO:g} to {max_ratio:g} times that",
        _MIN_RATIO * planned <= measured <= max_ratio * planned,
    )


def _sleep(
    label: str, device: str, trainer: Any, minibatch: Minibatch, before: float, free_gib: FreeMemory, layout: Layout
) -> list[Finding]:
    logprobs = trainer.logprobs(minibatch, 1.0).values.values
    awake = free_gib()
    trainer.sleep()
    asleep = free_gib()
    trainer.wake()
    again = trainer.logprobs(minibatch, 1.0).values.values
    findings = [
        Finding.compare(
            f"{label} after sleep and wake: logprobs",
            "equal" if np.array_equal(logprobs, again) else f"off by {np.abs(logprobs - again).max():.3g}",
            "equal bit for bit",
            np.array_equal(logprobs, again),
        )
    ]
    if device.startswith("cuda"):
        name = f"{label} asleep, {asleep - awake:.2f} GiB freed: memory kept, seen from another process"
        kept = total_gib(process_terms(layout)) + _TOLERANCE_GIB
        findings.append(Finding.at_most(name, before - asleep, kept, " GiB"))
    return findings
