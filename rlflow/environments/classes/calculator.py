"""A calculator tool: the model calls ``calc(12*7)`` and reads the result."""

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
# The longest expression.
_MAX_CHARACTERS = 200


@dataclass
class Calculator(Environment):
    """A calculator for numbers, ``+ - * /`` and parentheses. Results that are not whole numbers have six digits.

    A turn without a call ends the conversation.
    """

    batch_size = 64
    gives_rewards = False

    unknown: str = "?"
    """The answer to an expression that it cannot evaluate."""

    def step(self, text: str) -> Observation:
        _, called, rest = text.rpartition("calc(")
        expression, closed, _ = rest.rpartition(")")
        return Observation(_evaluate(expression) or self.unknown) if called and closed else Observation(done=True)


def _evaluate(expression: str) -> str | None:
    """Evaluate an expression; return None if it is invalid, too long, too large, or divides by zero."""
    if len(expression) > _MAX_CHARACTERS:
        return None
    try:
        value = _evaluate_tree(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.6g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluate_tree(tree: ast.expr) -> Fraction:
    """Evaluate a syntax tree. Raises ValueError for everything except arithmetic."""
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return Fraction(str(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_evaluate_tree(tree.operand)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_evaluate_tree(tree.left), _evaluate_tree(tree.right))
    raise ValueError(type(tree).__name__)


ENVIRONMENT = Calculator
