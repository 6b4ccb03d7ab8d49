import numpy as np
import pytest

from rlflow.batch import Rewards
from rlflow.nodes.advantage import GroupAdvantage
from tests.helpers import rollouts, sequences

GROUPS = rollouts(sequences([2, 2, 2], [[1, 1, 1, 1], [1, 1], [1]]))
REWARDS = Rewards(values=np.array([1, 0, 0, 1, 3, 3, 5], np.float32))


def test_by_hand() -> None:
    """The first group has mean 1/2 and standard deviation sqrt(4 * 1/4 / 3); the others do not differ in themselves."""
    high = 0.5 / (3**-0.5 + 1e-4)
    values = GroupAdvantage().run(GROUPS, REWARDS).values
    assert values == pytest.approx([high, -high, -high, high, 0, 0, 0], abs=1e-6)


def test_without_the_division() -> None:
    values = GroupAdvantage(normalize=False).run(GROUPS, REWARDS).values
    assert values == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, 0, 0])
