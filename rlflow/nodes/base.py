"""A node is a function with options: its fields are the options, the parameters of ``run`` the inputs.

A parameter ``engine`` names the capability asked of the node's role; ``exchange`` is what answers for an environment,
which the runtime gives as well; a parameter with a default is an optional input.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from rlflow.errors import GraphError
from rlflow.schema import Section

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


def _signature(cls: type[Node]) -> tuple[tuple[Input, ...], type]:
    run: Any = cls.run  # type: ignore[attr-defined]
    hints: Mapping[str, Any] = get_type_hints(run)
    inputs = tuple(
        Input(name, _without_none(hints[name]), parameter.default is inspect.Parameter.empty)
        for name, parameter in inspect.signature(run).parameters.items()
        if name != "self"
    )
    return inputs, hints["return"]


def _without_none(hint: Any) -> type:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if not isinstance(hint, type):
        raise TypeError(f"{hint} is not a class")
    return hint
