"""A graph with a critic: its roles, their heads, and what planning takes them for."""

from dataclasses import replace

import pytest

import rlflow
from rlflow.compiler.lower import lower
from rlflow.compiler.wire import wire
from rlflow.errors import UserError
from rlflow.recipe import Model
from rlflow.resources.models.architecture import ScalarModel
from tests.helpers import checked_graph, load

SCORED = "graph.old={node: logprobs, role: critic}"


def test_two_roles_are_trained_and_one_of_them_gives_values() -> None:
    graph = wire(load("recipe=ppo_tiny"))
    assert graph.trained_roles() == ["actor", "critic"]
    assert graph.capabilities("critic") == {"Trains", "Values"}
    nodes = {node.name: node for node in graph.nodes}
    assert set(nodes["value_update"].inputs) == {"rollouts", "values", "advantages"}
    assert set(nodes["advantages"].inputs) == {"rollouts", "rewards", "values", "reference"}


def test_the_critic_learns_in_the_minibatches_of_the_policy() -> None:
    recipe = load("recipe=ppo_tiny", "graph.update.num_minibatches=3", "graph.update.num_epochs=2")
    tasks = {task.node: task for task in lower(recipe, wire(recipe)).workload.tasks}
    for node in ("update", "value_update"):
        assert (tasks[node].minibatches, tasks[node].epochs) == (6, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["graph.value_update.role=actor"], "graph.value_update.role: graph.update needs 'actor' to have a vocabulary"),
        (["graph.update.role=critic"], "graph.update.role: graph.values needs 'critic' to have a value head, and"),
        (
            [SCORED, "graph.update.old_logprobs=old"],
            "graph.values.role: graph.old needs 'critic' to have a vocabulary head, and this node needs a value head",
        ),
        (["~graph.values"], "graph.advantages.values: no node 'values', which 'gae_advantage' reads"),
        (["graph.values.role=rollout"], "graph.values.role: graph.rollouts needs 'rollout' to have a vocabulary"),
        (["~graph.reference"], "graph.advantages.kl_coef: 0.001 needs the reference's logprobs"),
        (["graph.value_update.advantages=plain", "graph.plain={node: group_advantage}"], "graph.value_update.advant"),
    ],
)
def test_what_is_wrong_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        checked_graph(load("recipe=ppo_tiny", *overrides))
    assert str(raised.value).startswith(message)


@pytest.mark.slow
def test_a_critic_that_is_never_trained_needs_trained_values() -> None:
    """A recipe that trains nothing except a critic makes such a model."""
    policy = ("~graph.update", "~roles.actor", "~roles.rollout.follows")
    minibatches = ("graph.value_update.num_minibatches=2", "graph.value_update.num_epochs=1")
    values = load("recipe=ppo_tiny", *policy, *minibatches)
    fact = "roles.critic: 'critic' is never trained, and models.policy.recipe has no trained value head: its values"
    frozen = load("recipe=ppo_tiny", "~graph.value_update", "~roles.critic.optimizer")
    with pytest.raises(UserError) as raised:
        rlflow.compile(frozen, "local")
    assert str(raised.value) == (
        f"{fact} would be random.\n"
        "  Fix: graph.value_update={node: value_update, role: critic}, and roles.critic.optimizer={}."
    )
    models = {**frozen.models, "values": Model(recipe=values, dtype="float32")}
    roles = {**frozen.roles, "critic": replace(frozen.roles["critic"], model="values")}
    assert rlflow.compile(replace(frozen, models=models, roles=roles), "local").graph.trained_roles() == ["actor"]


def test_an_optimizer_of_a_critic_that_is_never_trained() -> None:
    with pytest.raises(UserError) as raised:
        checked_graph(load("recipe=ppo_tiny", "~graph.value_update"))
    assert str(raised.value) == (
        "roles.critic.optimizer: 'critic' is never trained.\n"
        "  Fix: add graph.value_update={node: value_update, role: critic}, or remove the optimizer."
    )


def test_a_critic_has_no_logits_in_the_plan() -> None:
    recipe = load("recipe=ppo_7b")
    demands = {demand.role: demand for demand in lower(recipe, wire(recipe)).demands}
    assert isinstance(demands["critic"].architecture, ScalarModel)
    assert not isinstance(demands["actor"].architecture, ScalarModel)


@pytest.mark.slow
def test_the_plan_has_the_memory_of_all_four() -> None:
    """Eighteen bytes a parameter of what is trained, and the head of the critic is smaller by a vocabulary."""
    pinned = ("zero_stage=3", "gradient_checkpointing=false")
    pins = [f"roles.{role}.{pin}" for role in ("actor", "critic") for pin in pinned]
    plan = rlflow.compile(load("recipe=ppo_7b", *pins), "2x8")
    assert set(plan.roles) == set(plan.prediction.memory) == {"actor", "critic", "reference", "rollout"}
    update = {role: plan.prediction.memory[role].phases["update"] for role in ("actor", "critic")}
    gpus = {role: plan.roles[role].layout.num_gpus for role in update}
    state = {
        role: gpus[role] * sum(terms[name] for name in ("weights", "gradients", "optimizer")) * 2**30
        for role, terms in update.items()
    }
    assert state["actor"] == pytest.approx(18 * 7_615_616_512)
    assert state["actor"] - state["critic"] == pytest.approx(18 * (152064 * 3584 - 3585))
    assert update["critic"]["logits"] < 0.01 < update["actor"]["logits"]
    assert plan.prediction.memory["reference"].phase == "score"
    assert plan.prediction.memory["rollout"].phase == "generate"
    assert all(sum(memory.phases[memory.phase].values()) > 0 for memory in plan.prediction.memory.values())


def test_the_edges_have_values_advantages_and_returns() -> None:
    recipe = load("recipe=ppo_7b", "expect.prompt_tokens=100", "expect.response_tokens=[400]")
    edges = {edge.name: edge for edge in lower(recipe, wire(recipe)).workload.edges}
    tokens = recipe.data.batch_size * 400
    assert edges["values"].stored == tokens * 4
    assert edges["advantages"].stored == tokens * 2 * 4
    assert edges["values"].readers == ("advantages", "value_update")


def test_more_than_one_trained_role_makes_no_base() -> None:
    recipe = load("recipe=ppo_tiny")
    base = replace(recipe.models["policy"], recipe=recipe)
    with pytest.raises(UserError, match="a recipe for a model trains one role, 'ppo_tiny' trains 2"):
        lower(replace(recipe, models={"policy": base}), wire(recipe))
