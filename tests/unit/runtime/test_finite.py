"""What the outputs of nodes must be, besides finite."""

import numpy as np
import pytest

from rlflow.batch import Repeated, RolloutAdvantages
from rlflow.errors import EngineError
from rlflow.runtime.finite import check_advantages
from tests.helpers import rollouts, sequences


@pytest.mark.parametrize("count", [1, 3])
def test_each_sample_has_one_advantage(count: int) -> None:
    given = rollouts(sequences([2], [[3, 1]]))
    lengths = np.array([3, 1, 1])
    for number in (2, count):
        advantages = RolloutAdvantages(values=Repeated(np.ones(number, np.float32), lengths[:number]))
        if number == len(given):
            check_advantages(advantages, {"rollouts": given})
        else:
            with pytest.raises(EngineError, match=f"expected an advantage for each of 2 samples, got {count}"):
                check_advantages(advantages, {"rollouts": given})
