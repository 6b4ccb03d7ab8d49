"""KL divergence from the reference: its estimate at one sampled token, and a coefficient that follows a target.

Source: http://joschu.net/blog/kl-approx.html. With d = log(policy / reference): k1 = d, unbiased; k2 = d^2 / 2, biased,
but in a loss its gradient is that of the divergence; k3 = exp(-d) - 1 + d, unbiased and never negative (DeepSeekMath,
arXiv 2402.03300, equation 4). In a loss the gradient of k1 is zero on average. One token's k3 counts as ``MAX_K3`` at
most, as in verl, OpenRLHF and slime: it grows as exp(-d).

Shapes: B rollouts, T response tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Logprobs, Packed, Rollouts, Sequences
from rlflow.errors import GraphError
from rlflow.nodes.base import State
from rlflow.nodes.expressions import old_probability

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Values = TypeVar("Values", "Tensor", NDArray[np.float64])

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded by it in both directions, as in verl, OpenRLHF and slime: exp(20) is 5e8, exp(89) infinite."""
MAX_K3 = 10.0
# The largest relative error of a step's divergence that counts, and the share of it that changes the coefficient.
_MAX_ERROR, _GAIN = 0.2, 0.1


def ratio(difference: "Tensor") -> "Tensor":
    """Return exp(difference) [T], constant and without a gradient beyond ``MAX_LOG_RATIO``."""
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(estimator: Estimator, difference: Values, inverse: Values) -> Values:
    """Return the estimate [T] from d = log(policy / reference) [T] and exp(-d) [T], tensors or arrays."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    return (inverse - 1 + difference).clip(max=MAX_K3)


def token_kl(estimator: Estimator, rollouts: Sequences, reference: Logprobs, old_logprobs: Logprobs | None) -> Packed:
    """Return the estimate for each response token, as B rows of float64.

    The policy's logprobs are ``old_logprobs``, or without them those of the engine that sampled. A token that the model
    did not generate itself has 0.
    """
    if old_logprobs is None:
        assert isinstance(rollouts, Rollouts), "see KlDivergence.check_graph"
        old_logprobs = Logprobs(values=rollouts.logprobs)
    policy = old_logprobs.values
    difference = policy.values.astype(np.float64) - reference.values.values
    difference = np.where(rollouts.own_tokens().values, difference, 0.0)
    inverse = np.exp(-difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return Packed(kl_estimate(estimator, difference, inverse), policy.offsets)


def kl_expression(estimator: Estimator, difference: str) -> str:
    """Return the estimate as a formula for people; ``difference`` is the symbol of the log-ratio."""
    d = difference
    return {"k1": d, "k2": f"{d}^2 / 2", "k3": f"(exp(-{d}) - 1 + {d})"}[estimator]


def old_difference(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """Return the formula of d_old, the log-ratio to the reference before the update."""
    return {"d_old": "log(p_old / p_ref)", **old_probability(symbols), "p_ref": f"p by {symbols['reference']}"}


@dataclass
class KlCoefficient(State):
    """A KL coefficient that follows a target divergence from step to step."""

    kl_coef: float

    def follow(self, kl: float, target: float) -> None:
        """Set the coefficient of the next step, after a step with the divergence ``kl``."""
        self.kl_coef = adapted_coefficient(self.kl_coef, kl, target)


def adapted_coefficient(coefficient: float, kl: float, target: float) -> float:
    """Return a larger coefficient where the divergence is above its target, and a smaller one where it is below.

    Source: Ziegler et al. (arXiv 1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1, -_MAX_ERROR), _MAX_ERROR)
    return coefficient * (1 + _GAIN * error)


def check_kl(kl_coef: float, kl_target: float | None, connected: frozenset[str]) -> None:
    """Raise GraphError, its path counted from the node, for a coefficient without the inputs that it needs."""
    if kl_coef > 0 and "reference" not in connected:
        raise GraphError(
            "kl_coef",
            f"{kl_coef} needs the reference's logprobs, and there is no node 'reference'",
            fix="add reference: {node: logprobs, role: reference}, or kl_coef: 0",
        )
    check_target(kl_coef, kl_target)


def check_target(kl_coef: float, kl_target: float | None) -> None:
    """Raise GraphError, its path counted from the node, for a target without a coefficient to start from."""
    if kl_target is not None and not kl_coef:
        raise GraphError("kl_coef", "expected a start value above 0 for kl_target, got 0", fix="kl_coef: 0.001")
