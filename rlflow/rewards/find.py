"""From the name of a reward function to what can be called."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.extras import check_extra
from rlflow.plugins import load_object
from rlflow.rewards import functions
from rlflow.rewards.found import Found, nothing
from rlflow.schema import Section, parse

# A function that takes it is told how long it may take; the node says it, not the options.
_TIMEOUT = "timeout_s"
# It ends by itself then, and the kill comes after.
_GRACE_S = 0.5


def find_reward(name: str, options: Mapping[str, Any], timeout_s: float) -> Found:
    """A file of rlflow.rewards.functions, or ``package.module:function``, with its options.

    Raises RecipeError at the paths ``function`` and ``options``.
    """
    prepare: Callable[[], None] = nothing
    if ":" in name:
        function = load_object(name, "function")
    else:
        module = registered(functions, name, "function", "reward")
        if hasattr(module, "EXTRA"):
            check_extra(module.EXTRA, "function", f"reward '{name}'")
        function, prepare = module.reward, getattr(module, "prepare", nothing)
    if not callable(function):
        raise RecipeError("function", f"'{name}' is not a function", fix="write package.module:function")
    wanted = _options(function)
    given = vars(parse(_section(wanted), options, "options"))
    limit_s = timeout_s
    if _TIMEOUT in wanted:
        given[_TIMEOUT] = timeout_s
        limit_s += _GRACE_S
    return Found(partial(function, **given), getattr(function, "batch_size", 1), limit_s, prepare)


def registered(package: ModuleType, name: str, path: str, what: str) -> ModuleType:
    """The file of that name in a package of them. Raises RecipeError at ``path`` where there is none."""
    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    if name not in known:
        raise RecipeError(
            path, f"no {what} '{name}'", known=[*known, "package.module:name"], fix=did_you_mean(name, known)
        )
    return import_module(f"{package.__name__}.{name}")


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
