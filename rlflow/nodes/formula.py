"""The loss as a formula that a person reads: each node states its own part.

Symbols: p is the probability of a response token under the trained model, r a reward, A an advantage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.nodes.kl import Estimator


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A node's output as an expression of its inputs."""

    symbol: str
    """The name of the output in other formulas."""
    expression: str
    where: Mapping[str, str] = field(default_factory=dict)
    """Expressions of further symbols in it."""


def old_probability(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """Return what p_old is: given by ``old_logprobs`` where that input is connected, else by who sampled."""
    return {"p_old": f"p by {symbols.get('old_logprobs') or symbols.get('rollouts', 'rollouts')}"}


def old_difference(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """Return what d_old is, the log-ratio to the reference before the update."""
    return {"d_old": "log(p_old / p_ref)", **old_probability(symbols), "p_ref": f"p by {symbols['reference']}"}


def kl_expression(estimator: Estimator, difference: str) -> str:
    """Return the estimate of a KL divergence from ``difference``, the symbol of a log-ratio."""
    d = difference
    return {"k1": d, "k2": f"{d}^2 / 2", "k3": f"(exp(-{d}) - 1 + {d})"}[estimator]


def defined_by(instance: object, method: str) -> int:
    """Return how many base classes up a method is defined: one that is overridden alone has outdated its formula."""
    return next(at for at, owner in enumerate(type(instance).__mro__) if method in vars(owner))


def times(coefficient: float, term: str) -> str:
    """Return the product, without a factor of 1."""
    return term if coefficient == 1 else f"{coefficient:g} {term}"
