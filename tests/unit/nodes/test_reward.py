import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Rewards
from rlflow.errors import EngineError, RecipeError, UserError
from rlflow.nodes.reward import Reward, SummedRewards
from rlflow.rewards.callables import RewardTerm
from rlflow.runtime.step import metrics_of
from tests.helpers import rollouts, sequences
from tests.unit.nodes.reward_functions import (
    good,
    large,
    not_a_number,
    not_numbers,
    number_as_text,
    one_fails,
    raising,
    tenfold,
    too_few,
    unreadable,
)

ROLLOUTS = rollouts(sequences([2], [[1, 1]]), texts=["1", "2"])


def named(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def run(**parts: RewardTerm) -> SummedRewards:
    given = Reward(functions=parts).run(ROLLOUTS)
    assert isinstance(given, SummedRewards)
    return given


def same(found: NDArray[Any], expected: Sequence[float]) -> bool:
    return np.array_equal(found, np.array(expected, found.dtype), equal_nan=True)


def test_a_function_of_the_users_own() -> None:
    assert Reward(function=named(good)).run(ROLLOUTS).values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "raising' failed (KeyError: 'solution')"),
        (too_few, "too_few' returned 0 values for 1 response"),
        (not_a_number, "not_a_number' returned nan for the response '2'"),
        (not_numbers, "not_numbers' returned the text 'yes' instead of a number"),
        (number_as_text, "number_as_text' returned the text '1.0' instead of a number"),
        (
            unreadable,
            "unreadable' found no 'answer' in the row (None).\n  Fix: correct the row or remove it from the data",
        ),
    ],
)
def test_a_reward_that_fails_is_never_a_number(function: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=r"^function: ") as raised:
        Reward(function=named(function)).run(ROLLOUTS)
    assert message in str(raised.value)


def test_a_weighted_sum_and_what_each_part_gave() -> None:
    given = run(
        good=RewardTerm(function=named(good), weight=0.5),
        twice=RewardTerm(function=named(tenfold), weight=-1.0, options={"times": 2}),
        watched=RewardTerm(function=named(tenfold), weight=0.0),
    )
    assert given.values.tolist() == [0.5 - 2, 1 - 4]
    assert {name: values.tolist() for name, values in given.parts.items()} == {
        "good": [1, 2],
        "twice": [2, 4],
        "watched": [10, 20],
    }
    assert given.reasons.tolist() == ["", ""]
    assert metrics_of("rewards", given) == {
        "rewards/mean": -2.25,
        "rewards/std": 0.75,
        "rewards/failed": 0.0,
        "rewards/good/mean": 1.5,
        "rewards/twice/mean": 3.0,
        "rewards/watched/mean": 15.0,
    }


def test_what_fails_is_excluded() -> None:
    given = run(good=RewardTerm(function=named(good)), out=RewardTerm(function=named(one_fails), on_failure="exclude"))
    assert same(given.values, [6, np.nan])
    assert same(given.parts["out"], [5, np.nan])
    assert same(given.parts["good"], [1, 2])
    assert given.reasons.tolist() == ["", "'out' is out"]
    assert metrics_of("r", given) == {
        "r/mean": 6.0,
        "r/std": 0.0,
        "r/failed": 0.5,
        "r/good/mean": 1.5,
        "r/out/mean": 5.0,
    }


def test_what_fails_has_a_value_of_its_own() -> None:
    given = run(
        good=RewardTerm(function=named(good)), out=RewardTerm(function=named(one_fails), weight=2.0, on_failure=-1.0)
    )
    assert same(given.values, [1 + 10, 2 - 2])
    assert given.reasons.tolist() == ["", "'out' is out"]


@pytest.mark.parametrize("weights", [(10.0, 1.0), (1.0, 1.0), (-1e300, 0.0)])
def test_a_sum_that_float32_cannot_hold_is_a_failure(weights: tuple[float, float]) -> None:
    """2e38 is a number of float32, but neither 2e39 nor twice 2e38 is."""
    parts = {
        name: RewardTerm(function=named(large), weight=weight, on_failure="exclude")
        for name, weight in zip("ab", weights, strict=True)
    }
    given = run(**parts)
    assert same(given.values, [0, np.nan])
    assert given.reasons[0] == ""
    assert "returned 2e+38, too large for a sum in float32 with a weight of" in given.reasons[1]
    assert metrics_of("r", given)["r/mean"] == 0
    with pytest.raises(RecipeError, match=r"functions\.[ab]: .* returned 2e\+38, too large for a sum in float32"):
        run(
            a=RewardTerm(function=named(large), weight=weights[0]),
            b=RewardTerm(function=named(large), weight=weights[1]),
        )


def test_infinite_rewards_of_any_node_end_the_run() -> None:
    rewards = Rewards(values=np.array([1, np.inf, np.nan], np.float32))
    with pytest.raises(EngineError, match=r"^rewards: 1 of 3 are infinite"):
        metrics_of("shaped", rewards)


def test_a_term_that_is_only_a_metric_excludes_nothing() -> None:
    given = run(
        good=RewardTerm(function=named(good)),
        out=RewardTerm(function=named(one_fails), weight=0.0, on_failure="exclude"),
    )
    assert same(given.values, [1, 2])
    assert metrics_of("r", given)["r/failed"] == 0.5


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (
            one_fails,
            EngineError,
            "reward '{}' is out. With on_failure: exclude under functions, such responses are left out.",
        ),
        (raising, RecipeError, "functions.part: '{}' failed (KeyError: 'solution')."),
    ],
)
def test_what_fails_ends_the_run(function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        run(part=RewardTerm(function=named(function)))
    assert str(raised.value).startswith(message.format(named(function)))


def test_a_step_in_which_all_fail_ends_the_run() -> None:
    """The metrics of the whole step raise the error, because all samples of one part may fail."""
    given = run(part=RewardTerm(function=named(raising), on_failure="exclude"))
    with pytest.raises(EngineError, match=r"^rewards: none of 2 responses has one: 'part' failed \(KeyError: 'solu"):
        metrics_of("rewards", given)
    made_of_these = Rewards(values=given.values)
    with pytest.raises(EngineError, match=r"^rewards: none of 2 responses has one: their inputs have none"):
        metrics_of("shaped", made_of_these)


def test_a_node_that_has_run_goes_to_another_process() -> None:
    node = Reward(functions={"good": RewardTerm(function=named(good))})
    node.run(ROLLOUTS)
    assert pickle.loads(pickle.dumps(node)) == node
    assert pickle.loads(pickle.dumps(node)).run(ROLLOUTS).values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Reward(), "function: expected one of 'function' and 'functions', got neither"),
        (
            Reward(function="exact", functions={"exact": RewardTerm()}),
            "function: expected one of 'function' and 'functions', got both",
        ),
        (
            Reward(functions={"exact": RewardTerm(weight=1e10, on_failure=-1e30)}),
            "functions.exact.on_failure: -1e+30 is too large for a sum in float32 with a weight of 1e+10",
        ),
        (Reward(functions={"exat": RewardTerm()}), "functions.exat.function: no reward 'exat'"),
        (Reward(functions={"form": RewardTerm(function="format")}), "functions.form.options.pattern: is missing"),
    ],
)
def test_mistakes(node: Reward, message: str) -> None:
    with pytest.raises(UserError) as raised:
        node.check(frozenset())
    assert str(raised.value).startswith(message)


def test_rewards_keep_their_parts_where_rows_are_taken_and_joined() -> None:
    given = run(good=RewardTerm(function=named(good)), out=RewardTerm(function=named(one_fails), on_failure="exclude"))
    turned = SummedRewards.concatenate([given.take(np.array([1])), given.take(np.array([0]))])
    assert same(turned.values, [np.nan, 6])
    assert same(turned.parts["good"], [2, 1])
    assert turned.reasons.tolist() == ["'out' is out", ""]
    assert isinstance(turned, Rewards)


def test_rewards_travel_between_processes() -> None:
    given = run(good=RewardTerm(function=named(good)), out=RewardTerm(function=named(one_fails), on_failure="exclude"))
    sent = pickle.loads(pickle.dumps(given))
    assert same(sent.values, [6, np.nan])
    assert same(sent.parts["out"], [5, np.nan])
    assert sent.reasons.tolist() == given.reasons.tolist()
