"""Checks of the outputs of nodes, besides those for values that are not finite."""

import numpy as np
import pytest

from rlflow.batch import Packed, Repeated, RolloutAdvantages, ValueEstimates
from rlflow.errors import EngineError, NotFiniteError
from rlflow.runtime.finite import check_advantages, check_values
from tests.helpers import rollouts, sequences


def advantages(count: int) -> RolloutAdvantages:
    lengths = np.array([3, 1, 1])[:count]
    return RolloutAdvantages(values=Repeated(np.ones(count, np.float32), lengths))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_critics_value_must_be_finite(bad: float) -> None:
    values = ValueEstimates(values=Packed.from_rows([[1, 1], [1, bad]], np.float32))
    with pytest.raises(NotFiniteError, match=r"^1 values of 1 of 2 samples are not finite \(.*; first at token 1\)\.$"):
        check_values(values, [])


@pytest.mark.parametrize("count", [1, 3])
def test_each_sample_has_one_advantage(count: int) -> None:
    edges = {"rollouts": rollouts(sequences([2], [[3, 1]]))}
    check_advantages(advantages(2), edges)
    with pytest.raises(EngineError, match=f"expected an advantage for each of 2 samples, got {count}"):
        check_advantages(advantages(count), edges)
