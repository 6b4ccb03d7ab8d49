"""Sums over the tokens of each response.

Shapes: T response tokens of a micro-batch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sums_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """[T]: for each token the sum of ``values`` [T] over its response, whose number is in ``rows`` [T].

    Gradients flow to ``values``. Where ranks share a sequence each has the values of all its tokens, so sums are whole.
    """
    # There are at least as many tokens as responses. Unlike index_add, this adds up in one order on GPUs too.
    sums = values.new_zeros(len(values)).index_put((rows,), values, accumulate=True)
    return sums[rows]


def means_over_responses(values: "Tensor", rows: "Tensor") -> "Tensor":
    """[T]: for each token the mean of ``values`` [T] over its response."""
    return sums_over_responses(values, rows) / sums_over_responses(values.detach().new_ones(len(values)), rows)
