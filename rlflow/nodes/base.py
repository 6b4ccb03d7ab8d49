"""The loss as a formula that a person reads: each node states its own part.

Symbols: p is the probability of a response token under the trained model, r a reward, A an advantage.

A node is a function with options: its fields are the options, the parameters of ``run`` the inputs.

A parameter ``engine`` names the capability asked of the node's role; ``exchange`` is what answers for an environment,
which the runtime gives as well; a parameter with a default is an optional input.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from rlflow.errors import GraphError
from rlflow.nodes.kl import Estimator
from rlflow.schema import Section


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


Unit = Literal["sample", "group", "batch"]

_GIVEN = ("engine", "exchange")

KINDS: dict[str, type["Node"]] = {}
"""The nodes that a recipe may name by kind."""


@dataclass(frozen=True)
class Input:
    name: str
    type: type
    required: bool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The facts about the surrounding graph that a node may use when it warns about its options."""

    connected: frozenset[str]
    """The node's inputs that are connected."""
    role: str | None
    engine: str | None
    """The engine of the node's role."""
    dtype: str | None
    """The number type of its role's model."""
    samplers: tuple[str, ...]
    """The engines that generate the responses which the node reads."""


@dataclass(frozen=True, kw_only=True)
class Node(Section):
    kind: ClassVar[str]
    unit: ClassVar[Unit]
    """How much the node needs at once."""
    reads_tokens: ClassVar[bool]
    """It reads what rollouts hold, and not only keys, lengths and what is said of them in a number each: without a role
    it runs where that is."""

    def __init_subclass__(cls, *, kind: str, unit: Unit, reads_tokens: bool | None = None) -> None:
        names = {f"{each.__module__}.{each.__qualname__}" for each in (cls, KINDS.get(kind, cls))}
        if len(names) > 1:
            raise TypeError(f"'{kind}' is the kind of two classes: {' and '.join(sorted(names))}")
        cls.kind = kind
        cls.unit = unit
        cls.reads_tokens = unit == "sample" if reads_tokens is None else reads_tokens
        KINDS[kind] = cls

    @classmethod
    def inputs(cls) -> tuple[Input, ...]:
        """In the order of ``run``'s parameters, without those that the runtime gives."""
        return tuple(item for item in _signature(cls)[0] if item.name not in _GIVEN)

    @classmethod
    def capability(cls) -> type | None:
        """What the node asks of its role's engine; None for a node without a role."""
        return next((item.type for item in _signature(cls)[0] if item.name == "engine"), None)

    @classmethod
    def output(cls) -> type:
        return _signature(cls)[1]

    @classmethod
    def check_signature(cls) -> None:
        """Raises GraphError, its path counted from the node, for a ``run`` that does not say all its types."""
        try:
            _signature(cls)
        except (AttributeError, KeyError, NameError, TypeError) as error:
            raise GraphError(
                "node", f"'{cls.kind}': the types of run cannot be read ({error!r})", fix="annotate all of it"
            ) from None

    def check(self, connected: frozenset[str]) -> None:
        """Raises a UserError, its path counted from the node, if the options do not go with the inputs connected."""

    def cautions(self, setting: Setting) -> Iterable[str]:
        """Return a line ``OPTION: REASON`` for each option that is legal and yet probably not what is wanted."""
        return ()

    def formula(self, symbols: Mapping[str, str]) -> Formula | None:
        """Return the output as a formula for people, or None. ``symbols`` names the inputs that are connected."""
        return None


def _signature(cls: type[Node]) -> tuple[tuple[Input, ...], type]:
    """Return the inputs and the output of ``run``, which may pass ``**inputs`` on to the ``run`` that it overrides."""
    inputs: dict[str, Input] = {}
    output: Any = None
    for run in (vars(each)["run"] for each in cls.__mro__ if "run" in vars(each)):
        hints: Mapping[str, Any] = get_type_hints(run)
        output = output or hints["return"]
        parameters = inspect.signature(run).parameters.values()
        for each in parameters:
            if each.name != "self" and each.kind is not inspect.Parameter.VAR_KEYWORD:
                required = each.default is inspect.Parameter.empty
                inputs.setdefault(each.name, Input(each.name, _without_none(hints[each.name]), required))
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            return tuple(inputs.values()), output
    raise AttributeError("run")


def _without_none(hint: Any) -> type:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if not isinstance(hint, type):
        raise TypeError(f"{hint} is not a class")
    return hint
