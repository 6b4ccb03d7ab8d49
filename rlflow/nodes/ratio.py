"""The ratio of two probabilities, from the difference of their logarithms.

Shapes: T response tokens of a micro-batch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by it in both directions, as in verl, OpenRLHF and slime: exp(20) is 5e8, exp(89) infinite."""


def ratio(difference: "Tensor") -> "Tensor":
    """Return exp(difference) [T]. Beyond ``MAX_LOG_RATIO`` it stays as it is there, without a gradient."""
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
