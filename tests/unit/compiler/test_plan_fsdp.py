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
    large = ("recipe=gspo_30b_a3b", "model@models.policy=qwen3_235b_a22b", "roles.actor.engine=fsdp")
    assert rlflow.compile(load(*large), "8x8").roles["actor"].layout.expert_parallel_size > 1
    small = ("recipe=gspo_30b_a3b", "roles.actor.engine=fsdp", "roles.actor.expert_parallel_size=4")
    assert rlflow.compile(load(*small), "2x8").roles["actor"].layout.expert_parallel_size == 4


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("actor.zero_stage=2", "zero_stage: does not apply to this role with engine 'fsdp'"),
        ("actor.offload=optimizer", "offload: does not apply to this role with engine 'fsdp'"),
        ("rollout.num_replicas=2", "num_replicas: does not apply to this role with engine 'vllm'"),
        ("actor.expert_parallel_size=2", "2 GPUs cannot divide the experts of a model that has no experts"),
        ("rollout.expert_parallel_size=2", "is 2, but engine 'vllm' cannot be expert-parallel"),
        ("actor.num_replicas=32", "num_replicas: 32 does not fit 2x8"),
    ],
)
def test_what_an_engine_has_not_is_refused(override: str, fact: str) -> None:
    with pytest.raises(PlacementError, match=fact):
        plan_of(f"roles.{override}")
