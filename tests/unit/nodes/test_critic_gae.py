"""Advantages and returns by hand, and on ragged random rows against the sums that define them, in float64."""

from itertools import chain
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Logprobs, Packed, Rewards, ValueEstimates
from rlflow.errors import GraphError
from rlflow.nodes.critic import GaeAdvantage, GaeAdvantages, discounted_sums
from tests.helpers import rollouts, sequences

DRAW = np.random.default_rng(0)
GIVEN = rollouts(sequences([2, 3, 1, 4], [[5, 1, 9], [2, 2], [12], [1, 7, 3, 3]]))
SIZE = len(GIVEN.response_ids.values)


def column(values: Any) -> Packed:
    return GIVEN.response_ids.like(np.asarray(values, np.float32))


VALUES = ValueEstimates(values=column(DRAW.normal(0.5, 1, SIZE)))
REWARDS = Rewards(values=DRAW.normal(0.3, 2, len(GIVEN)).astype(np.float32))
OWN, REFERENCE = (Logprobs(values=column(DRAW.normal(-2, 0.5, SIZE))) for _ in range(2))


def test_by_hand() -> None:
    """1, 2 and 4 are expected before three tokens, and the reward is 8: the errors are 0, 0 and 4."""
    given = rollouts(sequences([2], [[3]]))
    values = ValueEstimates(values=given.response_ids.like(np.array([1, 2, 4], np.float32)))
    rewards = Rewards(values=np.array([8], np.float32))
    out = GaeAdvantage(gamma=0.5, lam=0.5, normalize=False).run(given, rewards, values)
    assert out.values.values.tolist() == [0.25, 1, 4]
    assert out.returns.values.tolist() == [0.25 + 1, 1 + 2, 4 + 4]
    assert not out.excluded.any()


ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: exp(-d) - 1 + d,
}


def plain(node: GaeAdvantage, known: list[int]) -> tuple[list[list[float]], list[list[float]], float]:
    """Return advantages before they are normalised, returns, and the mean KL of the rows in ``known``."""
    advantages, returns, kls = [], [], []
    for row in known:
        expected = [float(value) for value in VALUES.values[row]] + [0.0]
        differences = [float(a) - float(b) for a, b in zip(OWN.values[row], REFERENCE.values[row], strict=True)]
        kl = [ESTIMATES[node.kl_estimator](difference) for difference in differences]
        gained = [-node.kl_coef * each for each in kl]
        gained[-1] += float(REWARDS.values[row])
        count = len(gained)
        errors = [gained[at] + node.gamma * expected[at + 1] - expected[at] for at in range(count)]
        of_row = [
            sum((node.gamma * node.lam) ** (later - at) * errors[later] for later in range(at, count))
            for at in range(count)
        ]
        advantages.append(of_row)
        returns.append([advantage + value for advantage, value in zip(of_row, expected, strict=False)])
        kls.append(sum(kl))
    return advantages, returns, sum(kls) / len(kls)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    return mean([(value - mean(values)) ** 2 for value in values])


@pytest.mark.parametrize("excluded", [[], [0, 4, 8]])
@pytest.mark.parametrize(
    "node",
    [
        GaeAdvantage(),
        GaeAdvantage(gamma=0.9, lam=0.7, kl_coef=0.3, kl_estimator="k3"),
        GaeAdvantage(lam=0.0, kl_coef=0.1, kl_estimator="k2", normalize=False),
        GaeAdvantage(lam=1.0, kl_coef=0.2, normalize=False),
        GaeAdvantage(gamma=0.5, lam=1.0),
    ],
)
def test_a_plain_loop_gives_the_same(node: GaeAdvantage, excluded: list[int]) -> None:
    """Rollouts without a reward are as if they had not been written."""
    rewards = REWARDS.values.copy()
    rewards[excluded] = np.nan
    ours = node.run(GIVEN, Rewards(values=rewards), VALUES, REFERENCE, OWN)
    assert np.flatnonzero(ours.excluded).tolist() == excluded
    assert (ours.is_included == ~ours.excluded).all()
    known = np.flatnonzero(ours.is_included).tolist()
    advantages, returns, kl = plain(node, known)
    flat, all_returns = (list(chain.from_iterable(rows)) for rows in (advantages, returns))
    middle, deviation = (mean(flat), sqrt(variance(flat)) + 1e-8) if node.normalize else (0.0, 1.0)
    kept = ours.take(np.array(known))
    assert kept.values.values == pytest.approx([(value - middle) / deviation for value in flat], abs=1e-6)
    assert kept.returns.values == pytest.approx(all_returns, abs=1e-6)
    assert ours.kl == pytest.approx(kl, abs=1e-6)
    assert ours.explained_variance == pytest.approx(1 - variance(flat) / variance(all_returns), abs=1e-6)
    missing = GIVEN.response_ids.lengths[excluded].sum()
    assert np.isnan(ours.values.values).sum() == np.isnan(ours.returns.values).sum() == missing


def test_without_later_values_the_advantage_is_what_comes_less_what_was_expected() -> None:
    out = GaeAdvantage(lam=1.0, normalize=False).run(GIVEN, REWARDS, VALUES)
    reward = np.repeat(REWARDS.values, GIVEN.response_ids.lengths)
    assert out.returns.values == pytest.approx(reward, abs=1e-6)
    assert out.values.values == pytest.approx(reward - VALUES.values.values, abs=1e-6)


def test_a_critic_that_knows_all_explains_all() -> None:
    reward = np.repeat(REWARDS.values, GIVEN.response_ids.lengths)
    out = GaeAdvantage().run(GIVEN, REWARDS, ValueEstimates(values=column(reward)))
    assert out.explained_variance == pytest.approx(1)
    assert np.abs(out.values.values).max() < 1e-6
    zeros = Rewards(values=np.zeros(len(GIVEN), np.float32)), ValueEstimates(values=column(np.zeros(SIZE)))
    nothing = GaeAdvantage().run(GIVEN, *zeros)
    assert (nothing.explained_variance, nothing.kl) == (0, 0)


def test_without_other_logprobs_the_policy_is_the_sampler() -> None:
    """Whose logprobs are 0 here."""
    reference = Logprobs(values=column(np.full(SIZE, -1)))
    assert GaeAdvantage().run(GIVEN, REWARDS, VALUES, reference).kl == pytest.approx(SIZE / len(GIVEN))


@pytest.mark.slow
def test_discounted_sums_of_long_rows_are_done_for_all_rows_at_once() -> None:
    """One row has almost all of 100,000 tokens, and with a discount of 1/2 its sum at the start is 2."""
    sums = discounted_sums(Packed(np.ones(100_000), np.array([0, 99_900, 99_901, 100_000])), 0.5)
    assert sums[[0, 99_899, 99_900, 99_999]].tolist() == [2, 1, 1, 1]
    assert discounted_sums(Packed(np.zeros(0), np.array([0])), 0.5).tolist() == []


def test_the_logprobs_that_the_kl_uses() -> None:
    with pytest.raises(GraphError, match=r"^kl_coef: 0\.1 needs the reference's logprobs"):
        GaeAdvantage(kl_coef=0.1).check(frozenset({"rollouts", "rewards", "values"}))
    with pytest.raises(GraphError, match=r"^kl_coef: expected a start value above 0 for kl_target, got 0"):
        GaeAdvantage(kl_target=0.1).check(frozenset({"reference"}))


def test_rows_keep_their_values() -> None:
    out = GaeAdvantage().run(GIVEN, REWARDS, VALUES, REFERENCE, OWN)
    taken = out.take(np.array([3, 0]))
    assert isinstance(taken, GaeAdvantages)
    assert taken.returns[0].tolist() == out.returns[3].tolist()
    assert (taken.kl, taken.explained_variance) == (out.kl, out.explained_variance)
