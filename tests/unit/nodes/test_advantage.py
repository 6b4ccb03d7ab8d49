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


@pytest.mark.parametrize("normalize", [True, False])
def test_excluded_rollouts_are_as_if_they_had_not_been_written(normalize: bool) -> None:
    given = np.array([1, np.nan, 0, 4, np.nan, 3, np.nan], np.float32)
    known = np.flatnonzero(np.isfinite(given))
    node = GroupAdvantage(normalize=normalize)
    values = node.run(GROUPS, Rewards(values=given)).values
    alone = node.run(GROUPS.take(known), Rewards(values=given[known])).values
    assert values[known].tolist() == alone.tolist()
    assert np.flatnonzero(np.isnan(values)).tolist() == [1, 4, 6]
    # Of the first group 1, 0 and 4 are left: their mean is 5/3, their deviation sqrt(13/3); of the second one alone.
    assert values[0] == pytest.approx((1 - 5 / 3) / ((13 / 3) ** 0.5 + 1e-4 if normalize else 1), abs=1e-6)
    assert values[5] == 0
