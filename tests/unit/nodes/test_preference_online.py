"""An online DPO from outside of rlflow: it learns from pairs that it makes of its own responses.

The measure follows from the inputs of the graph: it reads prompts, so it is a reward.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rlflow
from rlflow.batch import Logprobs, Metrics, Packed, Pairs, Rewards, Rollouts
from rlflow.compiler.graph import evaluation_nodes
from rlflow.compiler.wire import wire
from rlflow.engines.base import TrainsLogprobs
from rlflow.errors import GraphError
from rlflow.nodes.base import Node
from rlflow.nodes.minibatches import OptimizerSteps, Weighting, mean_metrics, train
from rlflow.nodes.preference import DpoLoss, Preference
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load


@dataclass(frozen=True, kw_only=True)
class OnlineDpo(Preference, Node, kind="online_dpo_update", unit="group"):
    """DPO on the best and the worst response of each group."""

    def run(self, engine: TrainsLogprobs, rollouts: Rollouts, rewards: Rewards, reference: Logprobs) -> Metrics:
        _, group = np.unique(rollouts.keys[:, :2], axis=0, return_inverse=True)
        order = np.lexsort((rewards.values, group))
        ends = np.searchsorted(group[order], np.arange(group.max() + 1), side="right") - 1
        starts = np.searchsorted(group[order], np.arange(group.max() + 1))
        rows = np.stack([order[ends], order[starts]], 1).ravel()
        keys = rollouts.keys[rows]
        keys[:, 2] = np.tile([0, 1], len(starts))
        pairs = Pairs(
            keys=keys, prompt_ids=rollouts.prompt_ids.take(rows), response_ids=rollouts.response_ids.take(rows)
        )
        columns: dict[str, Packed] = {"reference": reference.values.take(rows)}
        steps = train(
            engine,
            pairs,
            columns,
            DpoLoss(beta=0.1),
            OptimizerSteps(num_minibatches=1, weighting=Weighting(aggregation="sequence")),
        )
        return Metrics(values=mean_metrics(steps))

    def scores(self, engine: Any, pairs: Pairs, **inputs: Any) -> NDArray[np.float32]:
        raise AssertionError("no pairs are held out")


UPDATE = f"graph.update={{node: '{__name__}:OnlineDpo', role: actor}}"
OVERRIDES = ["recipe=fake", "~graph.advantages", f"~{UPDATE.split('=')[0]}", f"+{UPDATE}", "steps=2"]


def test_it_runs_and_is_judged_by_its_rewards(tmp_path: Path) -> None:
    plan = rlflow.compile(load(*OVERRIDES, config_dir=CONFIG_DIR))
    assert plan.graph.evaluation_metric == "reward"
    report = run(plan, tmp_path, LocalRuntime())
    assert report.status == "finished"
    assert report.eval_before is not None
    assert report.eval_after is not None


@dataclass(frozen=True, kw_only=True)
class LengthReward(Node, kind="length_reward", unit="sample"):
    """A reward that is not of the kind ``reward``."""

    def run(self, rollouts: Rollouts) -> Rewards:
        return Rewards(values=rollouts.response_ids.lengths.astype(np.float32))


@pytest.mark.slow
def test_any_node_that_gives_rewards_for_responses_judges(tmp_path: Path) -> None:
    rewards = "{node: length_reward}"
    overrides = ["recipe=fake", "~graph.rewards", f"+graph.rewards={rewards}", "steps=2"]
    report = run(rlflow.compile(load(*overrides, config_dir=CONFIG_DIR)), tmp_path, LocalRuntime())
    assert report.eval_after is not None
    assert report.eval_after >= 1


def test_what_reads_rewards_does_not_judge() -> None:
    """A penalty on rewards gives rewards, too."""
    penalty = "+graph.shaped={node: overlong_penalty, max_tokens: 4, buffer_tokens: 1}"
    alone = ["~graph.rewards", "+graph.given={node: length_reward}", "+graph.shaped.rewards=given"]
    graph = wire(load("recipe=fake", penalty, *alone, "+graph.advantages.rewards=shaped", config_dir=CONFIG_DIR))
    figure = evaluation_nodes(graph)
    assert figure is not None
    assert [node.name for node in figure] == ["rollouts", "given"]


@dataclass(frozen=True, kw_only=True)
class Silent(Node, kind="silent_pairs_update", unit="batch"):
    """A node that reads pairs and does not report its accuracy on them."""

    def run(self, engine: TrainsLogprobs, pairs: Pairs) -> Metrics:
        return Metrics(values={})


def test_pairs_without_an_accuracy_are_refused_when_compiling() -> None:
    overrides = ["recipe=dpo_tiny", "~graph.reference", "~roles.reference", "graph.update.node=silent_pairs_update"]
    with pytest.raises(GraphError, match="evaluation: no node that trains on pairs has a method 'accuracy'"):
        rlflow.compile(load(*overrides))
    rlflow.compile(load(*overrides, "evaluation=null"))
