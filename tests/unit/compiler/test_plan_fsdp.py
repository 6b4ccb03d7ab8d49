"""Plans with an engine that torch shards: replicas, and what may be pinned."""

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from tests.helpers import load


def plan_of(*overrides: str, cluster: str = "2x8") -> Plan:
    engines = ("roles.actor.engine=fsdp", "roles.reference.engine=fsdp")
    return rlflow.compile(load("recipe=grpo_7b", *engines, *overrides), cluster)


def test_replicas_are_pinned_or_one_for_each_host() -> None:
    assert plan_of("roles.actor.num_replicas=4").roles["actor"].layout.num_replicas == 4
    chosen = plan_of().roles
    assert {chosen[role].layout.num_replicas for role in ("actor", "reference")} <= {1, 2}
    assert plan_of(cluster="1x8").roles["actor"].layout.num_replicas == 1


@pytest.mark.slow
def test_experts_are_divided_inside_hosts_where_memory_asks_for_it() -> None:
    assert rlflow.compile(load("recipe=gspo_235b_a22b"), "8x8").roles["actor"].layout.expert_parallel_size > 1
    small = ("recipe=gspo_30b_a3b", "roles.actor.expert_parallel_size=4")
    assert rlflow.compile(load(*small), "2x8").roles["actor"].layout.expert_parallel_size == 4


@pytest.mark.slow
def test_an_engine_divides_experts_among_its_tensor_parallel_gpus() -> None:
    small = ("recipe=gspo_30b_a3b", "roles.actor.expert_parallel_size=1", "roles.actor.tensor_parallel_size=1")
    whole, cut = (
        rlflow.compile(load(*small, f"roles.rollout.{pin}_parallel_size=4"), "2x8") for pin in ("expert", "tensor")
    )
    sizes = [
        (of.tensor_parallel_size, of.expert_parallel_size) for of in (p.roles["rollout"].layout for p in (whole, cut))
    ]
    assert sizes == [(4, 4), (4, 1)]
    assert whole.prediction.nodes["rollouts"].seconds > cut.prediction.nodes["rollouts"].seconds
    weights = [plan.prediction.memory["rollout"].phases["generate"]["weights"] for plan in (whole, cut)]
    assert weights[0] == weights[1]
    # No number of GPUs that is a power of two divides this width.
    odd = ("models.policy.architecture.moe_intermediate_size=767", "roles.rollout.tensor_parallel_size=4")
    assert rlflow.compile(load(*small, *odd), "2x8").roles["rollout"].layout.expert_parallel_size == 4


def test_ranks_that_divide_layers_are_neighbours_of_one_gpu_each() -> None:
    actor = plan_of("roles.actor.tensor_parallel_size=4").roles["actor"]
    assert (actor.layout.data_parallel_size, actor.layout.ranks_per_share) == (4, 4)
    assert {len(worker.bundles) for worker in actor.workers} == {1}
    assert len({worker.bundles[0].host for worker in actor.workers[4:8]}) == 1


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (
            (
                "recipe=gspo_30b_a3b",
                "roles.rollout.tensor_parallel_size=8",
                "roles.rollout.expert_parallel_size=4",
            ),
            "is 4, but an engine divides experts among its 8 tensor-parallel GPUs, and shares none",
        ),
        (
            (
                "recipe=gspo_30b_a3b",
                "models.policy.architecture.moe_intermediate_size=767",
                "models.policy.architecture.num_experts=126",
                "roles.rollout.tensor_parallel_size=4",
            ),
            "4 GPUs cannot divide experts of width 767, nor 126 experts",
        ),
        (("recipe=grpo_lora_32b", "roles.actor.tensor_parallel_size=2"), "2 GPUs cannot divide layers that have adap"),
        (
            ("recipe=gspo_30b_a3b", "roles.actor.tensor_parallel_size=4", "roles.actor.expert_parallel_size=2"),
            "2 GPUs do not consist of tensor-parallel groups of 4, and experts are not cut",
        ),
        (
            ("recipe=gspo_30b_a3b", "model@models.policy=deepseek_v3", "roles.actor.tensor_parallel_size=2"),
            "2 GPUs cannot divide the layers of this model evenly",
        ),
    ],
)
def test_layers_that_cannot_be_divided(overrides: tuple[str, ...], fact: str) -> None:
    with pytest.raises(PlacementError, match=fact):
        rlflow.compile(load(*overrides, "roles.actor.engine=fsdp"), "2x8")


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("actor.zero_stage=2", "zero_stage: does not apply to this role with engine 'fsdp'"),
        ("actor.offload=optimizer", "offload: does not apply to this role with engine 'fsdp'"),
        ("rollout.num_replicas=2", "num_replicas: does not apply to this role with engine 'vllm'"),
        ("actor.expert_parallel_size=2", "2 GPUs cannot divide the experts of a model that has no experts"),
        ("rollout.expert_parallel_size=2", "2 GPUs cannot divide the experts of a model that has no experts"),
        ("actor.num_replicas=32", "32 does not fit 2x8.*32 replicas cannot share 16 data-parallel ranks evenly"),
        ("actor.tensor_parallel_size=8", "8 GPUs cannot divide the layers of this model evenly"),
    ],
)
def test_what_an_engine_has_not_is_refused(override: str, fact: str) -> None:
    with pytest.raises(PlacementError, match=fact):
        plan_of(f"roles.{override}")
