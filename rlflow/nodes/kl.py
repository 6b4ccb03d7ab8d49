"""The ratio of two probabilities, from the difference of their logarithms.

Shapes: T response tokens of a micro-batch.

The KL divergence from the reference, estimated at one sampled token.

Source: http://joschu.net/blog/kl-approx.html. With d = log(policy / reference): k1 = d, unbiased; k2 = d^2 / 2, biased,
but in a loss its gradient is that of the divergence; k3 = exp(-d) - 1 + d, unbiased and never negative (DeepSeekMath,
arXiv 2402.03300, equation 4). In a loss the gradient of k1 is zero on average. One token's k3 counts as ``MAX_K3`` at
most, as in verl, OpenRLHF and slime: it grows as exp(-d).
"""

from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Rollouts
from rlflow.errors import GraphError

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by it in both directions, as in verl, OpenRLHF and slime: exp(20) is 5e8, exp(89) infinite."""


def ratio(difference: "Tensor") -> "Tensor":
    """Return exp(difference) [T]. Beyond ``MAX_LOG_RATIO`` it stays as it is there, without a gradient."""
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


Estimator = Literal["k1", "k2", "k3"]
MAX_K3 = 10.0
# How far a step's divergence counts as off its target at most, and how much of that the coefficient follows.
_MOST, _GAIN = 0.2, 0.1
Values = TypeVar("Values", "Tensor", NDArray[np.float64])


def kl_estimate(estimator: Estimator, difference: Values, inverse: Values) -> Values:
    """Return the estimate [T] from d = log(policy / reference) [T] and exp(-d) [T], tensors or arrays."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    return (inverse - 1 + difference).clip(max=MAX_K3)


def token_kl(estimator: Estimator, rollouts: Rollouts, reference: Logprobs, old_logprobs: Logprobs | None) -> Packed:
    """B rows of float64: of each response token, the policy's logprob being that of ``old_logprobs``, or else that of
    the engine that sampled it; 0 of a token that is not the model's own."""
    own = rollouts.logprobs if old_logprobs is None else old_logprobs.values
    difference = own.values.astype(np.float64) - reference.values.values
    difference = np.where(rollouts.own_tokens().values, difference, 0.0)
    inverse = np.exp(-difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return Packed(kl_estimate(estimator, difference, inverse), own.offsets)


def check_kl(kl_coef: float, kl_target: float | None, connected: frozenset[str]) -> None:
    """Raises GraphError, its path counted from the node, for a coefficient without what it needs."""
    if kl_coef > 0 and "reference" not in connected:
        raise GraphError(
            "kl_coef",
            f"{kl_coef} asks for the reference's logprobs, and no node 'reference' gives them",
            fix="add reference: {node: logprobs, role: reference}, or kl_coef: 0",
        )
    check_target(kl_coef, kl_target)


def check_target(kl_coef: float, kl_target: float | None) -> None:
    """Raises GraphError, its path counted from the node, for a target that no coefficient leads to."""
    if kl_target is not None and not kl_coef:
        raise GraphError("kl_coef", "is 0, and a kl_target needs where to begin", fix="kl_coef: 0.001")


def adapted(coefficient: float, kl: float, target: float) -> float:
    """The coefficient of the next step, larger where the divergence was above its target, smaller where it was below.

    Source: Ziegler et al. (arXiv 1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -_MOST), _MOST)
    return coefficient * (1 + _GAIN * error)
