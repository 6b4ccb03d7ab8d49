from dataclasses import dataclass, replace
from typing import Any

import pytest

import rlflow
from rlflow.batch import Advantages, Metrics, Rewards, RolloutAdvantages, Rollouts
from rlflow.compiler.wire import wire
from rlflow.errors import GraphError, UserError
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.base import KINDS, GraphNode, Node, State
from rlflow.nodes.reward import Reward
from tests.conftest import CONFIG_DIR
from tests.helpers import checked_graph, load


def wired(*overrides: str) -> Any:
    return checked_graph(load("recipe=fake", *overrides, config_dir=CONFIG_DIR))


def test_every_node_comes_after_its_inputs() -> None:
    graph = wired()
    names = [node.name for node in graph.nodes]
    for node in graph.nodes:
        for origin in node.inputs.values():
            assert origin in graph.sources or names.index(origin) < names.index(node.name)
    assert graph.trained_roles() == ["actor"]
    assert graph.capabilities("reference") == {"Scores"}


def test_inputs_are_the_nodes_of_their_name() -> None:
    update = next(node for node in wired().nodes if node.name == "update")
    assert update.inputs == {"rollouts": "rollouts", "advantages": "advantages", "reference": "reference"}


def test_an_input_can_be_named() -> None:
    graph = wired("~graph.reference", "graph.ref={node: logprobs, role: reference}", "graph.update.reference=ref")
    update = next(node for node in graph.nodes if node.name == "update")
    assert update.inputs["reference"] == "ref"


@pytest.mark.parametrize(
    "overrides",
    [
        ["graph.rewards.function=number"],
        ["~graph.rewards.function", "graph.rewards.functions={exact: {on_failure: exclude}, number: {weight: 0}}"],
    ],
)
def test_remax_scores_its_baseline_like_the_responses(overrides: list[str]) -> None:
    nodes = {node.name: node.operation for node in wire(load("recipe=remax_tiny", *overrides)).nodes}
    assert isinstance(nodes["rewards"], Reward)
    assert nodes["greedy_rewards"] == nodes["rewards"]


def test_a_reward_that_only_evaluation_uses() -> None:
    assert {node.name for node in wire(load("recipe=distill_tiny")).nodes} >= {"rewards", "advantages"}
    with pytest.raises(UserError, match=r"^graph\.rewards: no node reads its Rewards"):
        checked_graph(load("recipe=distill_tiny", "evaluation=null"))


def test_no_option_has_the_name_of_an_input() -> None:
    for kind in [kind for kind in KINDS.values() if kind.__module__.startswith("rlflow.")]:
        assert not {item.name for item in kind.inputs()} & set(kind.__dataclass_fields__), kind


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("graph.rollouts.role=[actor]", "graph.rollouts.role: no role '['actor']'"),
        ("graph.rollouts.node=[generate]", "graph.rollouts.node: no kind of node '['generate']'"),
        ("data.eval_split=null", "data.eval_split: is missing, and evaluation needs it"),
        ("graph.update.reference=null", "graph.update.kl_coef: 0.001 needs the reference's logprobs"),
        ("graph.rewards.node=rewad", "graph.rewards.node: no kind of node 'rewad'"),
        ("graph.extra={role: actor}", "graph.extra: the recipe has no node 'extra'"),
        ("graph.update.clip=1", "graph.update.clip: unknown key"),
        ("graph.update.clip_eps=-1", "graph.update.clip_eps: -1 is not valid"),
        ("graph.rollouts.role=rolout", "graph.rollouts.role: no role 'rolout'"),
        (
            "graph.rollouts.role=null",
            "graph.rollouts.role: is missing: 'generate' needs a role whose",
        ),
        ("graph.rewards.role=actor", "graph.rewards.role: 'reward' uses no model, but has the role 'actor'"),
        ("graph.update.rollouts=rolouts", "graph.update.rollouts: no node 'rolouts', which 'policy_update' reads"),
        ("~graph.advantages", "graph.update.advantages: no node 'advantages', which 'policy_update' reads"),
        (
            "graph.update.advantages=rewards",
            "graph.update.advantages: 'rewards' gives Rewards, 'policy_update' reads Adv",
        ),
        ("graph.more={node: group_advantage}", "graph.more: no node reads its RolloutAdvantages"),
        ("graph.prompts={node: reward, function: exact}", "graph.prompts: 'prompts' is an edge of the data"),
        ("graph.rewards.function=exat", "graph.rewards.function: no reward 'exat'"),
        ("graph.rewards.function=nope:f", "graph.rewards.function: 'nope:f': the module 'nope' cannot be imported"),
        ("graph.rewards.function=rlflow:nope", "graph.rewards.function: 'rlflow:nope': 'rlflow' has no 'nope'"),
        ("graph.rewards.node=rlflow:load", "graph.rewards.node: 'rlflow:load' is not a Node"),
        ("graph.rewards.node=math:pi", "graph.rewards.node: 'math:pi': 'math' belongs to Python, and a recipe may"),
        ("~graph.reference", "graph.update.kl_coef: 0.001 needs the reference's logprobs"),
        ("roles.actor.engine=tork", "roles.actor.engine: no engine 'tork'"),
        ("roles.actor.model=polcy", "roles.actor.model: no model 'polcy'"),
        ("roles.actor.colocate=[rolout]", "roles.actor.colocate: no role 'rolout'"),
        (
            "roles.actor.engine=transformers",
            "roles.actor.engine: 'transformers' cannot do what graph.update needs, Trains",
        ),
        ("roles.extra={model: policy, engine: fake}", "roles.extra: no node uses this role"),
        ("roles.rollout.follows=reference", "roles.rollout.follows: 'reference' is never trained"),
        (
            "roles.actor={engine: fsdp, train: all}",
            "roles.actor.train: 'fsdp' trains the language part of a model alone.\n"
            "  Fix: train: language, or engine: deepspeed or torch",
        ),
        (
            "roles.actor={engine: deepspeed, optimizer: {kind: muon}}",
            "roles.actor.optimizer.kind: engine 'deepspeed' does not have 'muon'.\n"
            "  Fix: kind: adamw, or engine: fsdp or torch",
        ),
        (
            "roles.actor={optimizer: {kind: muon}, lora: {}}",
            "roles.actor.optimizer.kind: 'muon' trains whole matrices, not adapters",
        ),
        ("roles.rollout.follows=acto", "roles.rollout.follows: no role 'acto'"),
        ("roles.reference.optimizer={}", "roles.reference.optimizer: 'reference' is never trained"),
        (
            "roles.rollout.lora={}",
            "roles.rollout.lora: the role is never trained.\n  Fix: remove it; a role that follows",
        ),
        (
            "roles.actor.lora={experts: true}",
            "roles.actor.lora: asks for adapters of experts, and a qwen3 has none.\n"
            "  Fix: roles.actor.lora.experts=false",
        ),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        wired(override)
    assert str(raised.value).startswith(message)


@dataclass(frozen=True, kw_only=True)
class Turn(Node, kind="turn", unit="batch"):
    """Rewards from advantages, which closes a circle."""

    def run(self, advantages: Advantages) -> Rewards:
        raise AssertionError


def test_a_circle_is_drawn() -> None:
    with pytest.raises(UserError, match=r"is part of a cycle: (advantages -> turned|turned -> advantages)"):
        wired(f"graph.turned={{node: '{__name__}:Turn'}}", "graph.advantages.rewards=turned")


def test_follows_needs_the_same_model() -> None:
    with pytest.raises(UserError, match="'rollout' has the model 'other', 'actor' has 'policy'"):
        wired("models.other={path: x}", "roles.rollout.model=other")


@dataclass(frozen=True, kw_only=True)
class Doubled(GroupAdvantage, kind="doubled", unit="group"):
    """A node may inherit its ``run``."""


@dataclass(frozen=True, kw_only=True)
class Untyped(Node, kind="untyped", unit="group"):
    """A node that keeps its output for itself."""

    def run(self, rewards: Rewards):  # type: ignore[no-untyped-def]
        raise AssertionError


def test_nodes_of_the_users_own() -> None:
    graph = wired(f"graph.advantages.node='{__name__}:Doubled'")
    assert next(node for node in graph.nodes if node.name == "advantages").operation.output() is RolloutAdvantages
    with pytest.raises(UserError, match=r"^graph\.advantages\.node: 'untyped': the types of run cannot be read"):
        wired(f"graph.advantages.node='{__name__}:Untyped'")


def test_keyword_only_parameters_are_not_inputs() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Scaled(Node, kind="scaled_for_test", unit="sample"):
        def run(self, rollouts: Rollouts, *, factor: float = 2.0) -> Rewards:
            raise AssertionError

    @dataclass(frozen=True, kw_only=True)
    class Refused(Node, kind="refused_for_test", unit="sample"):
        def run(self, *, rollouts: Rollouts) -> Rewards:
            raise AssertionError

    assert [each.name for each in Scaled.inputs()] == ["rollouts"]
    with pytest.raises(GraphError, match="rollouts is keyword-only, so it is not an input, and needs a default"):
        Refused.inputs()


def test_two_nodes_of_one_kind() -> None:
    with pytest.raises(
        TypeError, match=r"'generate' is the kind of two classes: rlflow\.nodes\.generate\.Generate and tests"
    ):
        type("Other", (Node,), {}, kind="generate", unit="sample")
    copied = {"__module__": "mine.generate", "__qualname__": "Generate"}
    with pytest.raises(TypeError, match=r"two classes: mine\.generate\.Generate and rlflow\.nodes\.generate\.Generate"):
        type("Generate", (Node,), copied, kind="generate", unit="sample")


def test_a_graph_trains() -> None:
    with pytest.raises(UserError, match=r"^graph: no node trains a role"):
        wired("~graph.update", "graph.watch={node: '" + __name__ + ":Watch'}", "~graph.reference", "~roles.reference")


@dataclass(frozen=True, kw_only=True)
class Watch(Node, kind="watch", unit="batch"):
    """Ends a graph without training."""

    def run(self, advantages: Advantages) -> Metrics:
        raise AssertionError


def test_responses_that_are_longer_than_the_model() -> None:
    recipe = load("recipe=fake", "graph.rollouts.max_tokens=60", config_dir=CONFIG_DIR)
    with pytest.raises(UserError, match=r"^graph\.rollouts\.max_tokens: prompts of 8 and responses of 60 tokens are"):
        rlflow.compile(recipe)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("reward", {"function": "exact"}, True),
        ("kl_divergence", {}, True),
        ("teacher_advantage", {}, True),
        # A whole step at once; numbers alone; a state, and a number, that join all samples.
        ("token_advantage", {"kl_coef": 0.1}, False),
        ("group_advantage", {}, False),
        ("overlong_penalty", {"max_tokens": 4, "buffer_tokens": 2}, False),
        ("remembering_on_hosts", {}, False),
        ("printing_on_hosts", {}, False),
    ],
)
def test_nodes_that_run_on_every_host(kind: str, options: dict[str, Any], expected: bool) -> None:
    operation = KINDS[kind](**options)
    node = GraphNode(name="node", operation=operation, role=None, inputs={"rollouts": "rollouts"})
    assert node.runs_on_every_host is expected
    assert not replace(node, role="actor").runs_on_every_host


@dataclass(frozen=True, kw_only=True)
class Remembering(Node, kind="remembering_on_hosts", unit="sample"):
    """A sample node with a state."""

    def run(self, rollouts: Rollouts, state: State) -> Rewards:
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Printing(Node, kind="printing_on_hosts", unit="sample"):
    """A sample node with one output for all."""

    def run(self, rollouts: Rollouts) -> Metrics:
        raise AssertionError
