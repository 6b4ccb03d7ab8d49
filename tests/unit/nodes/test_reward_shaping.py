from typing import Any

import numpy as np
import pytest

from rlflow.batch import Divergences, Logprobs, Rewards
from rlflow.errors import RecipeError
from rlflow.nodes.kl import KlCoefficient
from rlflow.nodes.reward_shaping import KlDivergence, KlPenalty, OverlongPenalty
from tests.helpers import rollouts, sequences

GIVEN = rollouts(sequences([2, 3], [[1, 3], [2]]))
REWARDS = Rewards(values=np.array([1, 0, 2], np.float32))


def logprobs(*values: float) -> Logprobs:
    return Logprobs(values=GIVEN.response_ids.like(np.array(values, np.float32)))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [1 - 0.5 * 1, 0 - 0.5 * 2, 2 + 0.5 * 1]),
        ("k2", [1 - 0.5 * 0.5, 0 - 0.5 * (0.5 + 0.5 + 0), 2 - 0.5 * (0.5 + 0)]),
        ("k3", [1 - 0.5 * np.exp(-1), 0 - 0.5 * 2 * np.exp(-1), 2 - 0.5 * (np.e - 2)]),
    ],
)
def test_the_kl_of_a_whole_response(estimator: Any, expected: list[float]) -> None:
    """Differences 1; 1, 1 and 0; -1 and 0."""
    own, reference = logprobs(-1, -1, -1, -1, -2, -3), logprobs(-2, -2, -2, -1, -1, -3)
    kl = KlDivergence(kl_estimator=estimator).run(GIVEN, reference, own)
    assert KlPenalty(kl_coef=0.5).run(REWARDS, kl).values == pytest.approx(expected)


def test_where_there_is_no_reward_the_kl_does_not_count() -> None:
    node = KlPenalty(kl_coef=0.5, kl_target=3.5)
    kl = Divergences(values=np.array([1, 2, 6], np.float32))
    output = node.run(Rewards(values=np.array([1, np.nan, 2], np.float32)), kl, state := KlCoefficient(0.5))
    assert output.values == pytest.approx([0.5, np.nan, -1], nan_ok=True)
    assert state.kl_coef == 0.5, "the mean of 1 and 6 is on target"


def test_without_other_logprobs_the_samplers() -> None:
    """The sampler's logprobs are 0 here."""
    kl = KlDivergence().run(GIVEN, logprobs(-1, -1, -1, -1, -2, -3))
    assert kl.values.tolist() == [1, 3, 5]


def test_the_last_tokens_before_the_limit_cost() -> None:
    """The last 4 of 10 tokens cost: a response of 6 tokens costs nothing, and one of 10 costs 1."""
    lengths = [1, 6, 7, 8, 10]
    given = rollouts(sequences([2], [lengths]))
    rewards = Rewards(values=np.ones(5, np.float32))
    shaped = OverlongPenalty(max_tokens=10, buffer_tokens=4).run(given, rewards)
    assert shaped.values.tolist() == [1, 1, 0.75, 0.5, 0]


def test_a_buffer_is_a_part_of_the_limit() -> None:
    with pytest.raises(RecipeError, match="buffer_tokens: 5 is more than max_tokens, which is 4"):
        OverlongPenalty(max_tokens=4, buffer_tokens=5).check(frozenset())
