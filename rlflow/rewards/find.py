"""From the name of a reward function to what can be called."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.extras import check_extra
from rlflow.plugins import load_object
from rlflow.rewards import functions
from rlflow.rewards.base import RewardFunction
from rlflow.schema import Section, parse

# A function that takes it is told how long it may take; the node says it, not the options.
_TIMEOUT = "timeout_s"
# It ends by itself then, and the kill comes after.
_GRACE_S = 0.5


@dataclass(frozen=True)
class Found:
    call: RewardFunction
    batch_size: int
    """Responses of one call."""
    limit_s: float
    """A call that takes longer is ended from outside."""
    prepare: Callable[[], None]
    """Imports what takes long; called once, before workers are forked."""


def find_reward(name: str, options: Mapping[str, Any], timeout_s: float) -> Found:
    """A file of rlflow.rewards.functions, or ``package.module:function``, with its options.

    Raises RecipeError at the paths ``function`` and ``options``.
    """
    prepare: Callable[[], None] = _nothing
    if ":" in name:
        function = load_object(name, "function")
    else:
        module = _registered(name)
        function, prepare = module.reward, getattr(module, "prepare", _nothing)
    if not callable(function):
        raise RecipeError("function", f"'{name}' is not a function", fix="write package.module:function")
    wanted = _options(function)
    given = vars(parse(_section(wanted), options, "options"))
    limit_s = timeout_s
    if _TIMEOUT in wanted:
        given[_TIMEOUT] = timeout_s
        limit_s += _GRACE_S
    return Found(partial(function, **given), getattr(function, "batch_size", 1), limit_s, prepare)


def _registered(name: str) -> ModuleType:
    known = sorted(module.name for module in pkgutil.iter_modules(functions.__path__))
    if name not in known:
        raise RecipeError(
            "function",
            f"no reward '{name}'",
            known=[*known, "package.module:function"],
            fix=did_you_mean(name, known),
        )
    module = import_module(f"{functions.__name__}.{name}")
    if hasattr(module, "EXTRA"):
        check_extra(module.EXTRA, "function", f"reward '{name}'")
    return module


def _nothing() -> None:
    """Most functions need no preparation."""


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def _section(wanted: Mapping[str, inspect.Parameter]) -> type[Section]:
    """The options as a part of the recipe, so that they are checked as all of it is."""
    fields: list[Any] = []
    for option, parameter in wanted.items():
        if option == _TIMEOUT:
            continue
        kind = Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        is_needed = parameter.default is inspect.Parameter.empty
        fields.append((option, kind) if is_needed else (option, kind, field(default=parameter.default)))
    return make_dataclass("Options", fields, bases=(Section,), frozen=True, kw_only=True)
