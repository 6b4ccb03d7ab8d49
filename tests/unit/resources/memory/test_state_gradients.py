"""Memory of DeepSpeed's float32 gradients, by hand from the buffers that its source allocates."""

from dataclasses import replace
from typing import Any

import pytest

from rlflow.engines.sharded.settings import TRAINING_MEMORY as FP32
from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand
from rlflow.resources.layout import GIB, Layout, Resources
from rlflow.resources.memory.phases import _step_bytes, host_terms, update_terms
from rlflow.resources.memory.state import persistent_buffers, pipeline_stages, state_terms
from tests.unit.resources.memory.test_phases import card

SEVEN_B = card("qwen2_5_7b")
EIGHTH = SEVEN_B.num_parameters / 8 / GIB
# The embedding, and the head, of 152064 tokens and 3584 features: larger than a bucket of 2e8.
LARGEST = 152064 * 3584


def layout(stage: int, **options: Any) -> Layout:
    options = {"offload": "none"} | options
    return Layout(
        micro_batch_tokens=4096, data_parallel_size=8, zero_stage=stage, gradient_checkpointing=True, **options
    )


@pytest.mark.parametrize(("stage", "share"), [(1, 8), (2, 1), (3, 1)])
def test_gradients_have_four_bytes(stage: int, share: int) -> None:
    """Stage 1 has them whole on every rank (bf16_optimizer.py, fp32_groups_gradients_flat)."""
    assert state_terms(SEVEN_B, layout(stage), FP32)["gradients"] == pytest.approx(4 * share * EIGHTH)


@pytest.mark.parametrize(("stage", "on_gpu"), [(2, 4), (3, 0)])
def test_with_the_optimizer_on_the_host_stage_2_adds_them_up_on_the_gpu(stage: int, on_gpu: int) -> None:
    """stage_1_and_2.py, _build_compact_grad_partition_buffer; stage3.py, grad_partitions_flat_buffer.

    The host has them in fp32 for the optimizer either way, and in stage 3 as they are added up.
    """
    away = layout(stage, offload="optimizer")
    assert state_terms(SEVEN_B, away, FP32)["gradients"] == pytest.approx(on_gpu * EIGHTH)
    assert host_terms(SEVEN_B, away, FP32)["gradients"] == pytest.approx((4 + 4 - on_gpu) * EIGHTH)


def test_a_tensor_larger_than_a_bucket_is_reduced_by_itself() -> None:
    """Few tokens. Stage 2 has the embedding's gradient in bf16, as a copy that is sent, and in fp32; stage 3 in bf16
    and as a copy in fp32, beside 1e9 live weights."""
    two, three = (update_terms(SEVEN_B, layout(stage), FP32, 64)["gathered"] for stage in (2, 3))
    assert two == pytest.approx((2 + 2 + 4) * LARGEST / GIB)
    assert three == pytest.approx(((2 + 4) * LARGEST + 2e9) / GIB)


def test_muon_has_one_moment_of_the_layers() -> None:
    """Embedding and head keep both. The step of the largest matrix, 3584 x 18944, takes 16 bytes a value."""
    muon = replace(FP32, muon=True)
    plain, less = (state_terms(SEVEN_B, layout(3), training)["optimizer"] for training in (FP32, muon))
    assert plain - less == pytest.approx(4 * (EIGHTH - 2 * LARGEST / 8 / GIB))
    assert _step_bytes(SEVEN_B, layout(3), muon, next(pipeline_stages(SEVEN_B, layout(3)))) == 16 * 3584 * 18944


def test_stage_3_keeps_a_bucket_in_fp32() -> None:
    assert persistent_buffers(layout(3), FP32) == {"buckets": pytest.approx(4 * 200_000_000 / GIB)}


def test_stage_1_reduces_gradients_where_they_are() -> None:
    assert update_terms(SEVEN_B, layout(1), FP32, 16384)["gathered"] == 0


@pytest.mark.parametrize(("weight_bytes", "refused"), [(2, True), (4, False)])
def test_bfloat16_is_not_trained_without_zero(weight_bytes: float, refused: bool) -> None:
    demand = Demand(
        training=FP32,
        role="actor",
        engine="deepspeed",
        parallel=frozenset({"data"}),
        job="train",
        architecture=SEVEN_B,
        weight_bytes=weight_bytes,
        pins=Resources(zero_stage=0),
    )
    if not refused:
        demand.check(8)
        return
    with pytest.raises(PlacementError) as raised:
        demand.check(8)
    assert str(raised.value) == (
        "roles.actor.zero_stage: 0 sums gradients in bfloat16, the type of the weights, which loses small gradients in "
        "large sums.\n  Fix: roles.actor.zero_stage=1."
    )


def test_a_trained_tower_has_gradients_and_an_optimizer_too() -> None:
    """Stage 2 has its weights whole on every rank, as those of a frozen one."""
    seeing = card("qwen2_5_vl_7b")
    frozen, trained = (state_terms(seeing, layout(2), replace(FP32, trains_vision=trains)) for trains in (False, True))
    eighth = seeing.num_encoder_parameters / 8 / GIB
    assert trained["weights"] == pytest.approx(frozen["weights"])
    assert trained["gradients"] - frozen["gradients"] == pytest.approx(4 * eighth)
    assert trained["optimizer"] - frozen["optimizer"] == pytest.approx(FP32.optimizer * eighth)
