"""Evaluation on held-out rows by the graph that trains."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Logprobs, Metrics, Minibatch, Sequences
from rlflow.compiler.graph import Graph
from rlflow.compiler.wire import wire
from rlflow.engines.base import TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.nodes.base import Node
from rlflow.nodes.reward import Reward
from rlflow.nodes.scoring import RewardModel
from rlflow.recipe.evaluation import Evaluation
from rlflow.runtime.checkpoint import RunProgress, is_finished
from rlflow.runtime.evaluation import RewardEvaluator, evaluator_of
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Engines
from tests.conftest import CONFIG_DIR
from tests.helpers import load, pairs, spec

GIVEN = pairs(40)
EVERY_STEP = Evaluation(every=1, num_prompts=40)


class Untrained(FakeEngine):
    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        raise AssertionError("held-out pairs are not trained on")


class Liking(Untrained):
    """An engine whose logprobs are the numbers of the tokens."""

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        ids = sequences.response_ids
        return Logprobs(values=ids.like(ids.values.astype(np.float32)))


class Neutral(Untrained):
    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        ids = sequences.response_ids
        return Logprobs(values=ids.like(np.ones(len(ids.values), np.float32)))


def accuracy(recipe: str, **engines: Any) -> float:
    graph = wire(load(f"recipe={recipe}"))
    data: Any = SimpleNamespace(held_out_pairs=lambda name: GIVEN)
    runner = GraphRunner(graph, Engines({role: engine(spec()) for role, engine in engines.items()}))
    metrics = evaluator_of(graph, runner, EVERY_STEP, "test").run(data)
    assert metrics.keys() == {"evaluation/accuracy"}
    return metrics["evaluation/accuracy"]


def judge(graph: Graph) -> Node:
    evaluator = evaluator_of(graph, GraphRunner(graph, Engines()), EVERY_STEP, "test")
    assert isinstance(evaluator, RewardEvaluator)
    return evaluator.reward.operation


def test_dpo_is_compared_with_its_reference() -> None:
    assert accuracy("dpo_tiny", actor=Untrained, reference=Untrained) == 0.5
    sums = np.add.reduceat(GIVEN.response_ids.values - 1, GIVEN.response_ids.offsets[:-1])
    share = ((sums[::2] > sums[1::2]) + (sums[::2] == sums[1::2]) / 2).mean()
    assert share != 0.5
    assert accuracy("dpo_tiny", actor=Liking, reference=Neutral) == pytest.approx(share)


def test_a_reward_model_by_its_rewards() -> None:
    """The fake engine's are the lengths of responses."""
    lengths = GIVEN.response_ids.lengths
    share = ((lengths[::2] > lengths[1::2]) + (lengths[::2] == lengths[1::2]) / 2).mean()
    assert accuracy("rm_tiny", reward=Untrained) == pytest.approx(share)


@pytest.mark.slow
def test_a_function_judges_before_a_model_does() -> None:
    graph = wire(load("recipe=reward_model", config_dir=CONFIG_DIR))
    assert isinstance(judge(graph), Reward)
    alone = wire(load("recipe=reward_model", "~graph.exact", config_dir=CONFIG_DIR))
    assert isinstance(judge(alone), RewardModel)


@pytest.mark.parametrize(
    ("measures", "patience", "ends"),
    [
        ([0.5, 0.4], None, False),
        ([0.5], 1, False),
        ([0.5, 0.6], 1, False),
        ([0.5, 0.5], 1, True),
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4, 0.3], 2, True),
        ([0.1, 0.5, 0.4, 0.6], 2, False),
        ([0.1, 0.6, 0.4, 0.6], 2, True),
        ([-3.0, -2.0, -2.5], 2, False),
    ],
)
def test_a_run_ends_when_its_last_evaluations_bring_no_new_best(
    measures: list[float], patience: int | None, ends: bool
) -> None:
    evaluation = None if patience is None else replace(EVERY_STEP, patience=patience)
    plan: Any = SimpleNamespace(recipe=SimpleNamespace(steps=9, evaluation=evaluation))
    progress = RunProgress({}, 4, 0, {str(step): measure for step, measure in enumerate(measures)})
    assert is_finished(plan, progress) == ends
    assert is_finished(plan, replace(progress, step=9))
