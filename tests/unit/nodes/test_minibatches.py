"""The weights of tokens in a minibatch, by hand."""

import numpy as np
import pytest

from rlflow.nodes.minibatches import Aggregation, Weighting


@pytest.mark.parametrize(
    ("aggregation", "lengths", "counting", "weights"),
    [
        ("token", [1], [True], [1]),
        ("token", [1, 3], [True, True], [1 / 4, 1 / 4]),
        ("token", [1, 3], [True, False], [1, 0]),
        ("sequence", [1, 3], [True, True], [1 / 2, 1 / 6]),
        ("sequence", [1, 3], [False, True], [0, 1 / 3]),
        ("prompt", [1, 3], [True, True], [1 / 4, 1 / 4]),
        ("token", [2], [False], [0]),
    ],
)
def test_weights_sum_to_one_over_what_counts(
    aggregation: Aggregation, lengths: list[int], counting: list[bool], weights: list[float]
) -> None:
    keys = np.zeros((len(lengths), 2), np.int64)
    given = Weighting(aggregation=aggregation).weights(np.array(lengths), np.array(counting), keys)
    np.testing.assert_allclose(given.run_values, weights)
