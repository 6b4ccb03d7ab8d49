"""GDPO's advantage by hand, against a plain loop, and refused where it cannot be computed."""

from statistics import mean, stdev

import numpy as np
import pytest

from rlflow.batch import Rewards, RolloutAdvantages
from rlflow.compiler.checks import check
from rlflow.compiler.wire import wire
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.advantage_by_part import GdpoAdvantage
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.reward import SummedRewards
from tests.helpers import load, rollouts, sequences

SIZES = [4, 1, 6, 3]
GIVEN = rollouts(sequences([2] * 4, [[3] * size for size in SIZES]))


def rewards_of(parts: dict[str, list[float]], values: list[float] | None = None) -> SummedRewards:
    columns = {name: np.array(column, np.float32) for name, column in parts.items()}
    total = np.nansum(list(columns.values()), axis=0) if values is None else np.array(values)
    return SummedRewards(values=total.astype(np.float32), parts=columns, details={}, reasons=np.full(len(total), ""))


def of_each(advantages: RolloutAdvantages) -> list[float]:
    return [float(advantages.values[row][0]) for row in range(len(advantages))]


def test_a_small_part_counts_like_a_large_one() -> None:
    """In one group the large part prefers the first response, the small one the last: their weights decide."""
    pair = rollouts(sequences([2], [[3, 3]]))
    parts = rewards_of({"large": [100.0, 0.0], "small": [0.0, 1.0]})
    assert of_each(GroupAdvantage().run(pair, Rewards(values=parts.values))) == pytest.approx([0.707, -0.707], abs=1e-3)
    for small, first in ((0.9, 0.707), (1.1, -0.707)):
        both = GdpoAdvantage(weights={"large": 1.0, "small": small}).run(pair, parts)
        assert of_each(both) == pytest.approx([first, -first], abs=1e-3)


def test_against_a_plain_loop() -> None:
    """A response without a reward is excluded, and a part without a value adds nothing."""
    draw = np.random.default_rng(0)
    parts = {name: draw.normal(0, scale, sum(SIZES)).tolist() for name, scale in (("a", 1.0), ("b", 30.0))}
    parts["b"][2] = parts["a"][7] = parts["b"][7] = float("nan")
    values = [np.nan if row == 7 else 1.0 for row in range(sum(SIZES))]
    ours = GdpoAdvantage(weights={"a": 1.0, "b": 0.5}).run(GIVEN, rewards_of(parts, values))

    sums = [0.0] * sum(SIZES)
    for name, weight in (("a", 1.0), ("b", 0.5)):
        for prompt in range(len(SIZES)):
            rows = [row for row in range(sum(SIZES)) if GIVEN.keys[row, 1] == prompt and not np.isnan(parts[name][row])]
            column = [float(np.float32(parts[name][row])) for row in rows]
            spread = stdev(column) if len(column) > 1 else 0.0
            for row, value in zip(rows, column, strict=True):
                sums[row] += weight * (value - mean(column)) / (spread + 1e-4)
    known = [total for row, total in enumerate(sums) if row != 7]
    expected = [(total - mean(known)) / (stdev(known) + 1e-4) for total in known]
    assert ours.is_included.tolist() == [row != 7 for row in range(sum(SIZES))]
    assert [value for row, value in enumerate(of_each(ours)) if row != 7] == pytest.approx(expected, abs=1e-6)


def test_its_parts_are_those_of_the_reward() -> None:
    changes = ["recipe=grpo_tiny", "graph.advantages.node=gdpo_advantage"]
    recipe = load(*changes, "graph.advantages.weights={exact: 1.0}")
    check(recipe, wire(recipe))
    recipe = load(*changes, "graph.advantages.weights={length: 1.0}")
    with pytest.raises(
        GraphError, match=r"graph\.advantages\.weights\.length: graph\.rewards has no function 'length'"
    ):
        check(recipe, wire(recipe))
    with pytest.raises(RecipeError, match="weights: all are 0"):
        GdpoAdvantage(weights={"exact": 0.0}).check(frozenset())
    shaped = [
        "+graph.shaped={node: overlong_penalty, max_tokens: 4, buffer_tokens: 1}",
        "+graph.advantages.rewards=shaped",
    ]
    recipe = load(*changes, "graph.advantages.weights={exact: 1.0}", *shaped)
    with pytest.raises(GraphError, match=r"graph\.advantages\.rewards: the parts are not those of a node 'reward'"):
        check(recipe, wire(recipe))
