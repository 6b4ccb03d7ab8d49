"""Inputs of a node that belong to other responses, and old logprobs of another model."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

import rlflow
from rlflow.batch import Rewards, RolloutAdvantages, Rollouts
from rlflow.errors import GraphError
from rlflow.nodes.base import Node
from tests.helpers import load

OTHERS = "+graph.others={node: generate, role: rollout, max_tokens: 5}"


@dataclass(frozen=True, kw_only=True)
class Difference(Node, kind="difference_of_responses", unit="batch"):
    """A node that reads two sets of responses and does not say so."""

    def run(self, rollouts: Rollouts, rewards: Rewards, baseline: Rewards) -> RolloutAdvantages:
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class StatedDifference(Difference, Node, kind="stated_difference_of_responses", unit="batch"):
    """A node that says which of its inputs belong to other responses."""

    other_responses = frozenset({"baseline"})


@pytest.mark.slow
def test_outputs_that_belong_to_other_responses(refusals: Callable[[str], None]) -> None:
    refusals("other_responses")


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_old_logprobs_are_those_of_the_trained_weights(role: str) -> None:
    rlflow.compile(load("recipe=grpo_tiny", f"+graph.old_logprobs={{node: logprobs, role: {role}}}"), "local")


def test_a_node_says_which_inputs_belong_to_other_responses() -> None:
    baseline = ["+graph.other_rewards={node: reward, function: exact, rollouts: others}"]
    baseline += ["graph.advantages.baseline=other_rewards"]
    with pytest.raises(GraphError) as raised:
        rlflow.compile(
            load("recipe=grpo_tiny", OTHERS, *baseline, "graph.advantages.node=difference_of_responses"), "local"
        )
    assert str(raised.value) == (
        "graph.advantages.baseline: belongs to the responses of others, and input 'rollouts' to those of rollouts.\n"
        "  Fix: connect a node that reads rollouts, or name this input in other_responses of your node."
    )
    rlflow.compile(
        load("recipe=grpo_tiny", OTHERS, *baseline, "graph.advantages.node=stated_difference_of_responses"), "local"
    )
