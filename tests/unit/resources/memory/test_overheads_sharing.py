"""Memory of GPUs that roles share: buffers of weight syncs, NVLink SHARP, what stays at rest."""

from dataclasses import replace

import pytest

import rlflow
from benchmarks.published.libraries import DEEPSPEED, FSDP2
from rlflow.compiler.plan import Plan
from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import GIB
from rlflow.resources.memory.overheads import (
    CONTEXT_GIB,
    NCCL_COMMUNICATOR_GIB,
    NCCL_GIB,
    Sharp,
    asleep_terms,
    packed_gib,
    process_terms,
    sync_terms,
)
from rlflow.resources.memory.phases import generate_memory, score_terms, update_terms
from rlflow.resources.memory.state import persistent_buffers
from tests.helpers import load
from tests.unit.resources.memory.test_phases import QWEN, layout

# A host of eight H100, as in issue 9699 of vllm-project/vllm and in NCCL's logs.
HOPPER = Sharp(channels=16, gpus=8)
EMBEDDING = 152064 * 3584
"""The size of the largest tensor of Qwen2.5 7B."""


def test_a_buffer_has_room_for_the_largest_tensor() -> None:
    assert packed_gib(QWEN, 2) == pytest.approx(2 * EMBEDDING / GIB) == pytest.approx(1.0151, abs=1e-4)
    assert packed_gib(QWEN, 4) == pytest.approx(2 * packed_gib(QWEN, 2))
    small = replace(QWEN, vocab_size=32000)
    assert packed_gib(small, 2) == 1.0


def test_a_colocated_copy_has_buffers_on_both_sides() -> None:
    sharded, engine = layout(zero_stage=3, data_parallel_size=8), layout(tensor_parallel_size=2, data_parallel_size=4)
    without = sync_terms(QWEN, sharded, DEEPSPEED, engine)
    terms = sync_terms(QWEN, sharded, DEEPSPEED, engine, packed_bytes=2)
    largest = 2 * EMBEDDING / GIB
    # vLLM's own copies of the buffer's tensors, of a layer's that are not all there, and half of that layer.
    assert {name: terms[name] for name in terms.keys() - without.keys()} == pytest.approx(
        {"buffer": largest, "engine buffer": 2.5 * largest}
    )


def test_switches_that_add_need_buffers() -> None:
    """NCCL's log of eight H100: nvlsTotalSize 268435456."""
    assert HOPPER.gib(8) == 268435456 / GIB
    assert HOPPER.gib(16) == HOPPER.gib(8), "each host has its own"
    assert HOPPER.gib(4) == HOPPER.gib(8) / 2
    assert (HOPPER.gib(2), HOPPER.gib(1), Sharp().gib(8)) == (0, 0, 0)
    assert Sharp(channels=16, gpus=2).gib(8) == 0


def test_every_phase_counts_them() -> None:
    eight = layout(data_parallel_size=8, zero_stage=3)
    engine = layout(tensor_parallel_size=8, gpu_memory_utilization=0.9)
    for with_them, without in (
        (update_terms(QWEN, eight, DEEPSPEED, 4096, sharp=HOPPER), update_terms(QWEN, eight, DEEPSPEED, 4096)),
        (score_terms(QWEN, eight, 4096, sharp=HOPPER), score_terms(QWEN, eight, 4096)),
        (sync_terms(QWEN, eight, DEEPSPEED, sharp=HOPPER), sync_terms(QWEN, eight, DEEPSPEED)),
        (generate_memory(QWEN, engine, 79.6, sharp=HOPPER).terms, generate_memory(QWEN, engine, 79.6).terms),
        (process_terms(eight, HOPPER), process_terms(eight)),
        (asleep_terms(QWEN, 8, HOPPER), asleep_terms(QWEN, 8)),
    ):
        assert with_them["nccl"] - without["nccl"] == pytest.approx(0.25)
    cache = [generate_memory(QWEN, engine, 79.6, sharp=sharp).terms["kv"] for sharp in (Sharp(), HOPPER)]
    assert cache[0] - cache[1] == pytest.approx(0.25)


@pytest.mark.slow
def test_gpus_that_have_them() -> None:
    plan = plan_of("grpo_7b", "1x8@h100_80gb")
    kinds: dict[str, Gpu] = dict(plan.cluster.gpus)
    assert kinds["h100_80gb"].nvls_channels == 16
    assert plan_of("grpo_7b", "1x8@a100_80gb").cluster.gpus["a100_80gb"].nvls_channels == 0


def test_deepspeed_keeps_a_bucket_in_stage_3() -> None:
    """reduce_bucket_size is 5e8 elements, of bfloat16 here."""
    assert persistent_buffers(layout(zero_stage=3), DEEPSPEED) == {"buckets": pytest.approx(1e9 / GIB)}
    assert persistent_buffers(layout(zero_stage=2), DEEPSPEED) == persistent_buffers(layout(zero_stage=3), FSDP2) == {}
    assert update_terms(QWEN, layout(zero_stage=3), DEEPSPEED, 64)["buckets"] == pytest.approx(1e9 / GIB)


def plan_of(recipe: str, cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load(f"recipe={recipe}", *overrides), cluster)


def test_a_plan_counts_what_stays_and_what_is_sent() -> None:
    plan = plan_of("grpo_7b", "1x8", "roles.actor.zero_stage=3")
    actor, rollout = (plan.prediction.memory[role] for role in ("actor", "rollout"))
    assert not plan.roles["actor"].layout.sleeps
    assert actor.phases["sync"]["buffer"] == pytest.approx(packed_gib(QWEN, 2))
    # 2e8 gradients in float32.
    assert actor.phases["resting"]["buckets"] == pytest.approx(8e8 / GIB)
    assert actor.phases["resting"]["nccl"] == pytest.approx(NCCL_GIB + NCCL_COMMUNICATOR_GIB + 0.25)
    assert actor.phases["resting"]["context"] == CONTEXT_GIB
    assert rollout.host_gib["weights"] == 0, "a weight sync replaces them"


def test_torch_drops_its_gradients() -> None:
    idle = plan_of("grpo_7b", "1x1@b200", "roles.actor.engine=torch").prediction.memory["actor"].phases["resting"]
    assert "gradients" not in idle
    assert idle["weights"] == pytest.approx(2 * QWEN.num_parameters / GIB)


@pytest.mark.slow
def test_engines_with_adapters_keep_their_weights_with_the_host() -> None:
    rollout = plan_of("grpo_lora_32b", "2x8").prediction.memory["rollout"]
    phase = rollout.phases[rollout.phase]
    assert rollout.host_gib["weights"] == pytest.approx(2 * phase["weights"])
