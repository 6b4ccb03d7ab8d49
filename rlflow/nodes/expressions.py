"""The parts that formulas of several nodes have in common."""

from collections.abc import Mapping


def old_probability(symbols: Mapping[str, str]) -> Mapping[str, str]:
    """Return where p_old comes from: from ``old_logprobs`` where that is connected, else from the sampling engine."""
    return {"p_old": f"p by {symbols.get('old_logprobs') or symbols.get('rollouts', 'rollouts')}"}


def times(coefficient: float, term: str) -> str:
    """Return the product, without a factor of 1."""
    return term if coefficient == 1 else f"{coefficient:g} {term}"


def inheritance_depth(instance: object, method: str) -> int:
    """Return how many base classes up a method is defined: a method overridden alone has outdated its formula."""
    return next(depth for depth, owner in enumerate(type(instance).__mro__) if method in vars(owner))
