"""Pairs of a policy's own responses: which are chosen, and runs that train on them."""

from pathlib import Path

import numpy as np
import pytest

import rlflow
from rlflow.batch import Rewards
from rlflow.errors import GraphError, NotFiniteError
from rlflow.nodes.preference_pairs import PreferencePairs
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load, metrics_of, rollouts, sequences

NAN = np.nan
GIVEN = rollouts(sequences([2, 3, 1, 2], [[1, 2, 3, 4], [2, 2], [3, 1, 2], [1, 1]]))
REWARDS = Rewards(values=np.array([0.5, 2, -1, 1, 1, 1, NAN, 3, 4, NAN, 0], np.float32))


@pytest.mark.parametrize(("per_group", "rows"), [(1, [1, 2, 8, 7]), (2, [1, 2, 3, 0, 8, 7])])
def test_the_best_and_the_worst_of_each_group(per_group: int, rows: list[int]) -> None:
    """The second group has equal rewards, and the last has one response with a reward."""
    pairs = PreferencePairs(per_group=per_group).run(GIVEN, REWARDS)
    assert pairs.unit_size == 2
    assert [pairs.response_ids[row].tolist() for row in range(len(pairs))] == [
        GIVEN.response_ids[row].tolist() for row in rows
    ]
    assert [pairs.prompt_ids[row].tolist() for row in range(len(pairs))] == [
        GIVEN.prompt_ids[row].tolist() for row in rows
    ]
    samples = [0, 1, 2, 3, 0, 1] if per_group == 2 else [0, 1, 0, 1]
    assert pairs.keys.tolist() == [[0, GIVEN.keys[row, 1], sample] for row, sample in zip(rows, samples, strict=True)]


def test_old_numbers_of_all_responses_do_not_fit_pairs() -> None:
    with pytest.raises(GraphError, match=r"belongs to the responses of rollouts"):
        rlflow.compile(load("recipe=online_dpo_tiny", "graph.reference.rollouts=rollouts"), "local")


def test_without_a_pair_there_is_nothing_to_train_on() -> None:
    with pytest.raises(NotFiniteError, match="all responses to each prompt have the same reward"):
        PreferencePairs().run(GIVEN, Rewards(values=np.ones(len(GIVEN), np.float32)))


@pytest.mark.slow
def test_online_dpo_trains_on_pairs(tmp_path: Path) -> None:
    graph = (
        *("~graph.advantages", "~graph.update", "graph.reference.rollouts=preferences"),
        "+graph.preferences={node: preference_pairs}",
        "+graph.update={node: dpo_update, role: actor, pairs: preferences}",
    )
    plan = rlflow.compile(load("recipe=real", "steps=2", *graph, config_dir=CONFIG_DIR), "local")
    run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    steps = [line for line in metrics_of(tmp_path) if "rewards/mean" in line]
    assert steps[0]["update/accuracy"] == 0.5, "the policy is its reference"
    assert steps[1]["update/accuracy"] != 0.5
    assert steps[0]["tokens"] <= 3 * 4 * 4, "pairs do not count as further responses"
