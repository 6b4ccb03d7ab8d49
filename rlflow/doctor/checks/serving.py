"""Checks of vLLM: memory that sleep gives back, and the same responses after it wakes."""

from typing import Any

from rlflow.doctor.checks.models import HALF_BILLION, prompts_of, spec_of
from rlflow.doctor.checks.transfers import seen_from_another_process
from rlflow.doctor.finding import Measurement
from rlflow.engines.base import Sampling
from rlflow.engines.registry import engine_class
from rlflow.resources.layout import Layout
from rlflow.resources.memory.overheads import asleep_terms
from rlflow.resources.memory.state import total_gib
from rlflow.resources.models.architecture import Architecture

_UTILIZATION = 0.5
# A sleeping engine may keep so much beyond the plan, in GiB.
_TOLERANCE_GIB = 1.0


def sleep(
    device: str, *, architecture: Architecture = HALF_BILLION, prompts: int = 32, max_tokens: int = 64
) -> list[Measurement]:
    """Generate, sleep, wake and generate again; the freed memory is measured from another process."""
    layout = Layout(micro_batch_tokens=8192, gpu_memory_utilization=_UTILIZATION, sleeps=device != "cpu")
    with seen_from_another_process(device) as free_gib:
        before = free_gib()
        spec = spec_of(architecture, layout, "Generates", device=device, max_model_len=16 + max_tokens)
        engine: Any = engine_class("vllm")(spec)
        given, sampling = prompts_of(prompts, 16), Sampling(max_tokens=max_tokens)
        first = engine.generate(given, sampling)
        awake = free_gib()
        engine.sleep()
        asleep = free_gib()
        engine.wake()
        again = engine.generate(given, sampling)
        same = sum(one == other for one, other in zip(first.texts, again.texts, strict=True))
    measurements = [
        Measurement(
            "vllm after sleep and wake: equal responses",
            f"{same} of {prompts}",
            # Batches may form differently, and bfloat16 then rounds differently; noise would leave none equal.
            f"at least {prompts // 2}",
            same >= prompts // 2,
        )
    ]
    if device.startswith("cuda"):
        name = f"vllm asleep, {asleep - awake:.2f} GiB freed: memory kept, seen from another process"
        kept = total_gib(asleep_terms(architecture))
        measurements.append(Measurement.at_most(name, before - asleep, kept + _TOLERANCE_GIB, " GiB"))
    return measurements
