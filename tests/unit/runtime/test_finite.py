"""Checks of the outputs of nodes, besides those for values that are not finite."""

import numpy as np
import pytest

from rlflow.batch import Repeated, RolloutAdvantages
from rlflow.errors import EngineError
from rlflow.runtime.finite import check_advantages
from tests.helpers import rollouts, sequences


def advantages(count: int) -> RolloutAdvantages:
    lengths = np.array([3, 1, 1])[:count]
    return RolloutAdvantages(values=Repeated(np.ones(count, np.float32), lengths))


@pytest.mark.parametrize("count", [1, 3])
def test_each_sample_has_one_advantage(count: int) -> None:
    edges = {"rollouts": rollouts(sequences([2], [[3, 1]]))}
    check_advantages(advantages(2), edges)
    with pytest.raises(EngineError, match=f"expected an advantage for each of 2 samples, got {count}"):
        check_advantages(advantages(count), edges)
