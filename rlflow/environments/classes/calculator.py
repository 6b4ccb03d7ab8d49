"""A tool: what the model writes as ``calc(12*7)`` is worked out, and a turn without a call ends the conversation."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rlflow.environments.base import Environment, Observation

_OPERATORS: Mapping[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Of an expression.
_MOST_CHARACTERS = 200


@dataclass
class Calculator(Environment):
    """It knows numbers, ``+ - * /`` and parentheses. Results that are not whole have six digits."""

    batch_size = 64

    unknown: str = "?"
    """The answer to what it cannot work out."""

    def step(self, text: str) -> Observation:
        _, called, rest = text.rpartition("calc(")
        expression, closed, _ = rest.rpartition(")")
        return Observation(_result(expression) or self.unknown) if called and closed else Observation(done=True)


def _result(expression: str) -> str | None:
    """None of what is no expression, too long, too large, or divided by nought."""
    if len(expression) > _MOST_CHARACTERS:
        return None
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.6g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(tree: ast.expr) -> Fraction:
    """Raises ValueError for all that is not arithmetic."""
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return Fraction(str(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value(tree.operand)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_value(tree.left), _value(tree.right))
    raise ValueError(type(tree).__name__)


ENVIRONMENT = Calculator
