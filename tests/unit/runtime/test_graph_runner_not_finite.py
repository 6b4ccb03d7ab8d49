"""A value that is not a number ends the step with an error that says where it is, unless its rollout is excluded."""

from dataclasses import dataclass

import numpy as np
import pytest

import rlflow
from rlflow.batch import Logprobs, Repeated, Rewards, RolloutAdvantages, Rollouts, TokenAdvantages
from rlflow.compiler.graph import Graph
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError, GraphError
from rlflow.nodes.advantages import GreedyAdvantage, GroupAdvantage
from rlflow.nodes.base import GraphNode, Node
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.recipe import Optimizer
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Engines
from tests.helpers import load, rollouts, sequences, spec

WRITTEN = rollouts(sequences([2, 3], [[1, 2, 3], [4]]))


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Node, kind="finite_leave_one_out", unit="group"):
    """The node of docs/extending.md."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        _, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
        total, size = np.bincount(group, rewards.values)[group], np.bincount(group)[group]
        with np.errstate(invalid="ignore", divide="ignore"):
            values = rewards.values - (total - rewards.values) / (size - 1)
        return RolloutAdvantages(values=Repeated(values.astype(np.float32), rollouts.response_ids.lengths))


def run(node: Node, rewards: list[float], **more: object) -> RolloutAdvantages:
    inputs = {name: name for name in ("rollouts", "rewards", *more)}
    edges = {"rollouts": WRITTEN, "rewards": Rewards(values=np.array(rewards, np.float32)), **more}
    graph = Graph(nodes=(GraphNode(name="advantages", operation=node, role=None, inputs=inputs),))
    output: RolloutAdvantages = GraphRunner(graph, Engines()).run_node(graph.nodes[0], edges)
    return output


def test_compiling_refuses_groups_of_one_for_any_node() -> None:
    overrides = [f"graph.advantages.node='{__name__}:LeaveOneOut'", "graph.rollouts.group_size=1"]
    with pytest.raises(GraphError, match=r"^graph\.advantages: compares .*, but group_size is 1"):
        rlflow.compile(load("recipe=grpo_tiny", *overrides))


def test_an_advantage_that_is_not_finite_is_named() -> None:
    """The second group has one rollout, and all of them have a reward."""
    message = r"node advantages: the advantage is not finite for 1 of 4 samples .*\(step 0 prompt 1 sample 0\)"
    with pytest.raises(EngineError, match=message):
        run(LeaveOneOut(), [1, 0, 1, 1])


def test_an_infinite_advantage_is_named_where_others_of_its_prompt_are_excluded() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Infinite(Node, kind="finite_infinite", unit="batch"):
        def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
            values = np.array([np.inf, np.nan, 0, 0], np.float32)
            return RolloutAdvantages(values=Repeated(values, rollouts.response_ids.lengths))

    with pytest.raises(EngineError, match="for 1 of 4 samples"):
        run(Infinite(), [1, np.nan, 1, 1])


def test_a_rollout_without_a_reward_has_no_advantage_on_purpose() -> None:
    assert run(GroupAdvantage(), [1, np.nan, 0, 1]).is_included.tolist() == [True, False, True, True]
    # The rest of its group may go with it.
    assert run(LeaveOneOut(), [1, 0, 1, np.nan]).is_included.tolist() == [True, True, True, False]


def test_nor_has_a_prompt_whose_greedy_response_has_no_reward() -> None:
    greedy = rollouts(sequences([2, 3], [[1], [1]]))
    known = run(
        GreedyAdvantage(),
        [1, 0, 1, 1],
        greedy=greedy,
        greedy_rewards=Rewards(values=np.array([np.nan, 1], np.float32)),
    ).is_included
    assert known.tolist() == [False, False, False, True]


def test_a_loss_that_is_not_finite_names_its_samples_and_their_cause() -> None:
    values = WRITTEN.response_ids.like(np.array([1, 1, np.nan, 1, 1, 1, 1, 1, np.inf, 1], np.float32))
    engine = TorchEngine(spec())
    before = {name: value.clone() for name, value in engine.weights()}
    message = (
        r"role actor: the loss is nan at 2 of 10 tokens of a pass "
        r"\(step 0 prompt 0 sample 1, step 0 prompt 1 sample 0; first at token 1\); not finite there: advantages\."
    )
    with pytest.raises(EngineError, match=message):
        PolicyUpdate().run(engine, WRITTEN, TokenAdvantages(values=values, excluded=np.zeros(4, np.bool_)))
    assert all((value == before[name]).all() for name, value in engine.weights())


def test_outputs_of_the_model_are_named_as_causes() -> None:
    advantages = RolloutAdvantages(values=Repeated(np.ones(4, np.float32), WRITTEN.response_ids.lengths))
    reference = Logprobs(values=WRITTEN.response_ids.like(np.full(10, np.nan, np.float32)))
    with pytest.raises(EngineError, match=r"and 1 more; first at token 0\); not finite there: reference\."):
        PolicyUpdate(kl_coef=0.1).run(TorchEngine(spec()), WRITTEN, advantages, reference=reference)
    broken = TorchEngine(spec())
    next(iter(broken._model.parameters())).data.fill_(np.nan)
    with pytest.raises(EngineError, match="not finite there: the model's outputs"):
        PolicyUpdate().run(broken, WRITTEN, advantages)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    """The loss is: 1e38 times a logprob; the square of its gradient is not."""
    engine = TorchEngine(spec(optimizer=Optimizer(max_grad_norm=1.0)))
    huge = RolloutAdvantages(values=Repeated(np.full(4, 2e37, np.float32), WRITTEN.response_ids.lengths))
    with pytest.raises(EngineError, match=r"role actor: grad_norm is (inf|nan), although the loss is"):
        PolicyUpdate().run(engine, WRITTEN, huge)
