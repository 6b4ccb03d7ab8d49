"""Routing replay in plans: which roles record and use the experts of tokens, and what is refused."""

import pytest

import rlflow
from rlflow.compiler.models import replays_routing
from rlflow.compiler.wire import wire
from rlflow.errors import GraphError
from rlflow.report.plan_facts import describe_routing
from tests.helpers import load

MOE = "model@models.policy=qwen3_30b_a3b"


def roles_that_replay(*overrides: str) -> list[str]:
    recipe = load(*overrides)
    graph = wire(recipe)
    return [role for role in recipe.roles if replays_routing(recipe, graph, role)]


def test_the_policy_uses_the_experts_of_its_sampler() -> None:
    assert roles_that_replay("recipe=ppo_7b", MOE) == ["actor", "rollout"]
    assert roles_that_replay("recipe=ppo_7b", MOE, "roles.actor.routing_replay=false") == []
    assert roles_that_replay("recipe=ppo_7b") == []
    assert roles_that_replay("recipe=dpo_7b", MOE) == []


def test_the_plan_says_so_and_has_no_pipeline_stages() -> None:
    plan = rlflow.compile(load("recipe=gspo_30b_a3b"), "2x8")
    assert list(describe_routing(plan)) == ["actor replays the experts that rollout used, 384 B for each token"]
    assert plan.roles["rollout"].layout.pipeline_parallel_size == 1
    assert list(describe_routing(rlflow.compile(load("recipe=grpo_tiny"), "local"))) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "roles.rollout.engine=fake",
            "roles.rollout.engine: 'fake' cannot tell the experts of a token, which roles.actor",
        ),
        (
            "roles.actor.engine=fake",
            "roles.actor.engine: 'fake' cannot use the experts of the sampler, which roles.actor",
        ),
        (
            "roles.rollout.pipeline_parallel_size=2",
            "roles.rollout.pipeline_parallel_size: stages do not know all experts",
        ),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(GraphError) as raised:
        rlflow.compile(load("recipe=gspo_30b_a3b", override), "2x8")
    assert str(raised.value).startswith(message)
    rlflow.compile(load("recipe=gspo_30b_a3b", override, "roles.actor.routing_replay=false"), "2x8")
