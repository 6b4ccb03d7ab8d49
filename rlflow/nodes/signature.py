"""The inputs and the output of a node, from the types of its function ``run``."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Input:
    """An input of a node: a parameter of its ``run``."""

    name: str
    type: type
    required: bool


def read_signature(kind: type) -> tuple[tuple[Input, ...], type]:
    """Return the inputs and the output of ``run``, which may pass ``**inputs`` to the ``run`` that it overrides."""
    inputs: dict[str, Input] = {}
    output: Any = None
    for run in (vars(base)["run"] for base in kind.__mro__ if "run" in vars(base)):
        hints: Mapping[str, Any] = get_type_hints(run)
        output = output or hints["return"]
        parameters = inspect.signature(run).parameters.values()
        for parameter in parameters:
            required = parameter.default is inspect.Parameter.empty
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and required:
                raise TypeError(f"{parameter.name} is keyword-only, so it is not an input, and needs a default")
            if parameter.name != "self" and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                inputs.setdefault(parameter.name, Input(parameter.name, _without_none(hints[parameter.name]), required))
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return tuple(inputs.values()), output
    raise AttributeError("run")


def _without_none(hint: Any) -> type:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        hint = next(part for part in get_args(hint) if part is not type(None))
    if not isinstance(hint, type):
        raise TypeError(f"{hint} is not a class")
    return hint
