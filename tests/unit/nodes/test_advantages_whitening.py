"""Normalising over a batch: exact where rewards differ, quiet where they agree, and by either variance."""

from math import sqrt
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Logprobs, Rewards, ValueEstimates
from rlflow.nodes.advantages import BatchAdvantage, GroupAdvantage, TokenAdvantage
from rlflow.nodes.critic import GaeAdvantage
from tests.helpers import rollouts, sequences

DRAW = np.random.default_rng(0)
WRITTEN = rollouts(sequences([2] * 4, [DRAW.integers(1, 6, 4).tolist() for _ in range(4)]))
LENGTHS = WRITTEN.response_ids.lengths
ZEROS = WRITTEN.response_ids.like(np.zeros(LENGTHS.sum(), np.float32))
OTHERS: dict[str, Any] = {"reference": Logprobs(values=ZEROS), "values": ValueEstimates(values=ZEROS)}
NODES = [BatchAdvantage(), TokenAdvantage(), GaeAdvantage(lam=1.0)]


def tokens(node: Any, rewards: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    more = {item.name: OTHERS[item.name] for item in node.inputs() if item.name in OTHERS}
    return node.run(rollouts=WRITTEN, rewards=Rewards(values=rewards), **more).values.values.astype(np.float64)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.kind)
def test_noise_in_rewards_that_agree_stays_noise(node: Any) -> None:
    """Over a standard deviation of its own it would be as large as a whole reward."""
    noise = (0.5 + 1e-6 * DRAW.normal(size=16)).astype(np.float32)
    assert 0 < np.abs(tokens(node, noise)).max() < 0.05


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", [type(node) for node in NODES])
def test_the_variance_is_by_n_or_by_n_minus_one(kind: Any, unbiased: bool) -> None:
    rewards = DRAW.normal(size=16).astype(np.float32)
    values = rewards.astype(np.float64)
    if kind is BatchAdvantage:
        values = (values.reshape(4, 4) - values.reshape(4, 4).mean(1, keepdims=True)).ravel()
    flat = [float(value) for value, length in zip(values, LENGTHS, strict=True) for _ in range(length)]
    mean = sum(flat) / len(flat)
    variance = sum((value - mean) ** 2 for value in flat) / (len(flat) - unbiased)
    expected = [(value - mean) / sqrt(variance + 1e-8) for value in flat]
    options = {"lam": 1.0} if kind is GaeAdvantage else {}
    assert tokens(kind(unbiased=unbiased, **options), rewards) == pytest.approx(expected, abs=1e-5)


def test_the_constant_added_to_the_deviation_of_a_group() -> None:
    """Rewards 1 and 0 have the standard deviation sqrt(1/2) by n - 1; verl adds 1e-6 to it."""
    pair = rollouts(sequences([1], [[1, 1]]))
    rewards = Rewards(values=np.array([1, 0], np.float32))
    for epsilon in (1e-4, 1e-6, 0.5):
        values = GroupAdvantage(epsilon=epsilon).run(pair, rewards).values.values
        assert values == pytest.approx([0.5 / (sqrt(0.5) + epsilon), -0.5 / (sqrt(0.5) + epsilon)], rel=1e-6)
    assert GroupAdvantage().epsilon == 1e-4
