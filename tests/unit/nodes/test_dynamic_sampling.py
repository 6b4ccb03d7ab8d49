"""The choice of prompts whose rewards differ, by hand."""

import numpy as np

from rlflow.batch import Rewards
from rlflow.nodes.dynamic_sampling import DynamicSampling
from tests.helpers import rollouts, sequences

NAN = np.nan


def test_where_rewards_differ() -> None:
    """The groups have equal rewards (two of them), one that differs, one known reward, none, and two known ones."""
    rewards = [1, 1, 1], [0, 0, 0], [0, 1, 0], [NAN, 1, NAN], [NAN, NAN, NAN], [0, NAN, 1], [NAN, 0.5, 0.5]
    given = rollouts(sequences([2] * 7, [[1] * 3] * 7))
    values = np.array(rewards, np.float32).ravel()
    expected = [False, False, True, False, False, True, False]
    assert DynamicSampling().run(given, Rewards(values=values)).chosen.tolist() == expected
    order = np.random.default_rng(0).permutation(21)
    shuffled = DynamicSampling().run(given.take(order), Rewards(values=values[order]))
    assert shuffled.chosen.tolist() == expected, "in the order of keys, whatever that of the rows"
