"""Passes of a model that torch shards, against sums by hand."""

from dataclasses import replace

import pytest

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import TrainingMemory, state_terms
from rlflow.resources.time.passes import Kernels, Pass, PassBatch, training
from rlflow.resources.time.speed import Efficiency
from tests.unit.resources.time.test_passes import LLAMA, SPEED

# Nothing is hidden behind compute, and links carry all that they can.
EXPOSED = replace(SPEED, efficiency=Efficiency(overlap=0.0, link=1.0, balance=1.0))
# Seconds in which a ring over two hosts of eight GPUs, and over one host, sends a byte of each parameter.
RING = LLAMA.num_parameters * 15 / 16 / min(SPEED.link, SPEED.network * 8)
IN_HOST = LLAMA.num_parameters * 7 / 8 / SPEED.link
LAYOUT = Layout(micro_batch_tokens=4096, data_parallel_size=16, zero_stage=3, gradient_checkpointing=True)
SIZES = {"weights": 4, "gradients": 4, "optimizer": 8}
BATCH = PassBatch(tokens=4 * 16 * 4096, length=1024)
GIVEN = Kernels(gradient_bytes=4)


def of(**options: object) -> Pass:
    return training(LLAMA, replace(LAYOUT, **options), EXPOSED, BATCH, GIVEN)  # type: ignore[arg-type]


def test_torch_gathers_a_recomputed_layer_twice_and_not_three_times() -> None:
    assert of().communication == pytest.approx(4 * (3 * 2 + 4) * RING)
    assert of(num_replicas=1).communication == pytest.approx(4 * (2 * 2 + 4) * RING)


def test_gradients_of_all_passes_are_reduced_once() -> None:
    assert of(num_replicas=1, reduces_once=True).communication == pytest.approx((4 * 2 * 2 + 4) * RING)


def test_replicas_gather_inside_their_hosts_and_sum_shards_between_them() -> None:
    between = 2 * 4 * LLAMA.num_parameters / 8 * 1 / 2 / SPEED.network
    assert of(num_replicas=2).communication == pytest.approx(4 * (2 * 2 + 4) * IN_HOST + between)


def test_replicas_shard_less_and_one_reduction_keeps_all_gradients() -> None:
    memory = TrainingMemory(weights=4, gradients=4, optimizer=8)
    gib = LLAMA.num_parameters / 2**30

    def terms(**options: object) -> dict[str, float]:
        return state_terms(LLAMA, replace(LAYOUT, **options), memory)  # type: ignore[arg-type]

    assert terms(num_replicas=1) == pytest.approx({name: size * gib / 16 for name, size in SIZES.items()})
    assert terms(num_replicas=2) == pytest.approx({name: size * gib / 8 for name, size in SIZES.items()})
    assert terms(num_replicas=1, reduces_once=True)["gradients"] == pytest.approx(4 * gib)
