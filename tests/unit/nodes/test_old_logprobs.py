from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Logprobs, Metrics, Minibatch, Repeated, RolloutAdvantages, Sequences
from rlflow.compiler.lower import lower
from rlflow.compiler.wire import wire
from rlflow.engines.base import TokenLoss
from rlflow.nodes.old_logprobs import LaterLogprobs
from rlflow.nodes.policy_update import PolicyUpdate
from tests.conftest import CONFIG_DIR
from tests.helpers import checked_graph, load, rollouts, sequences

NODE = "+graph.old_logprobs={node: logprobs, role: actor}"
GIVEN = rollouts(sequences([2, 3, 1], [[1, 2], [4, 5], [3, 2]]))


class Engine:
    """Scores each token with the number of its prompt, and keeps what it scores and trains on."""

    def __init__(self) -> None:
        self.scored: list[list[int]] = []
        self.trained: list[Minibatch] = []

    def logprobs(self, batch: Sequences, temperature: float) -> Logprobs:
        self.scored += batch.keys.tolist()
        prompts = np.repeat(batch.keys[:, 1], batch.response_ids.lengths)
        return Logprobs(values=batch.response_ids.like(prompts.astype(np.float32)))

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        self.trained.append(minibatch)
        return Metrics(values={"loss": 0.0, "logprob_change": 0.0})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def kind_and_tasks(*overrides: str) -> tuple[str, dict[str, int]]:
    """Return the kind of the node that scores, and the samples of each task."""
    recipe = load("recipe=fake", NODE, *overrides, config_dir=CONFIG_DIR)
    graph = checked_graph(recipe)
    samples = {task.node: task.samples for task in lower(recipe, graph).workload.tasks}
    return next(node.operation.kind for node in graph.nodes if node.name == "old_logprobs"), samples


def test_the_first_minibatch_is_not_scored_before_the_update() -> None:
    kind, samples = kind_and_tasks("+graph.update.num_minibatches=3")
    assert (kind, samples["old_logprobs"], samples["update"]) == ("later_logprobs", 4, 6)


def test_with_one_minibatch_the_plan_has_no_scoring() -> None:
    kind, samples = kind_and_tasks()
    assert kind == "later_logprobs"
    assert "old_logprobs" not in samples


@pytest.mark.parametrize(
    "overrides",
    [
        ["+graph.update.score_first_minibatch=true"],
        ["+graph.update.num_epochs=2"],
        ["graph.old_logprobs.role=rollout"],
        ["graph.advantages={node: token_advantage, kl_coef: 0.1}"],
        ["+graph.also={node: policy_update, role: actor, old_logprobs: null}"],
    ],
    ids=["on request", "epochs", "another role", "an advantage reads it", "two updates"],
)
def test_all_rows_are_scored_where_something_needs_them(overrides: Sequence[str]) -> None:
    kind, samples = kind_and_tasks(*overrides)
    assert (kind, samples["old_logprobs"]) == ("logprobs", 6)


@pytest.mark.parametrize(
    ("excluded", "num_minibatches", "scored", "columns"),
    [
        ([], 1, [], [None]),
        ([], 3, [1, 1, 2, 2], [None, [1, 1], [2, 2]]),
        # Without prompt 0, prompt 1 is the first minibatch.
        ([0, 1], 2, [2, 2], [None, [2, 2]]),
        ([0, 2, 3, 4, 5], 2, [], [None]),
        ([0, 1, 2, 3, 4, 5], 2, [], []),
    ],
)
def test_an_update_has_them_for_all_minibatches_except_the_first(
    excluded: list[int], num_minibatches: int, scored: list[int], columns: list[list[int] | None]
) -> None:
    engine = Engine()
    values = np.zeros(6, np.float32)
    values[excluded] = np.nan
    advantages = RolloutAdvantages(values=Repeated(values, GIVEN.response_ids.lengths))
    old = LaterLogprobs(num_parts=num_minibatches).run(engine, GIVEN, advantages)
    assert [prompt for _, prompt, _ in engine.scored] == scored
    PolicyUpdate(num_minibatches=num_minibatches).run(engine, GIVEN, advantages, old_logprobs=old)
    seen = [minibatch.columns.get("old_logprobs") for minibatch in engine.trained]
    assert [column and [row[0] for row in map(column.__getitem__, range(len(column)))] for column in seen] == columns
    assert all("sampler_logprobs" in minibatch.columns for minibatch in engine.trained)


def test_it_is_scored_last_when_other_roles_can_work_before() -> None:
    """Nodes without a role come first: those with one can then run beside each other, and the trained role in a row."""
    graph = wire(load("recipe=grpo_32b"))
    assert [node.name for node in graph.nodes] == [
        *("rollouts", "rewards", "advantages", "reference", "old_logprobs", "update")
    ]
