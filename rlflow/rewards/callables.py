"""From the name of a reward function to what can be called.

One reward of a node: which function, its weight in the sum, and what becomes of its failures.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.extras import check_extra
from rlflow.plugins import load_object
from rlflow.rewards import functions
from rlflow.rewards.base import Found, nothing
from rlflow.schema import Section, parse

# A function that takes it is told how long it may take; the node says it, not the options.
_TIMEOUT = "timeout_s"
# It ends by itself then, and the kill comes after, on a host with too much to do as well.
_GRACE_S = 0.9


def find_reward(name: str, options: Mapping[str, Any], timeout_s: float) -> Found:
    """A file of rlflow.rewards.functions, or ``package.module:function``, with its options.

    Raises RecipeError at the paths ``function`` and ``options``.
    """
    module = None
    if ":" in name:
        function = load_object(name, "function")
    else:
        module = registered(functions, name, "function", "reward")
        if hasattr(module, "EXTRA"):
            check_extra(module.EXTRA, "function", f"reward '{name}'")
        function = module.reward
    if not callable(function):
        raise RecipeError("function", f"'{name}' is not a function", fix="write package.module:function")
    try:
        wanted = _options(function)
        given = vars(parse(_section(wanted), options, "options"))
    except RecipeError:
        raise
    except Exception as error:  # whatever inspect, dataclasses and pydantic raise for the user's own annotations
        raise RecipeError(
            "function",
            f"the options of '{name}' cannot be read ({first_line(error)})",
            fix="annotate its keyword-only parameters with types that a recipe can hold",
        ) from None
    if check := getattr(module, "check", None):
        check(**given)
    prepare = getattr(module, "prepare", nothing)
    prepare = partial(prepare, **{option: given[option] for option in _options(prepare)})
    limit_s, keeps_time = timeout_s, _TIMEOUT in wanted
    if keeps_time:
        given[_TIMEOUT] = timeout_s
        limit_s += _GRACE_S
    return Found(partial(function, **given), getattr(function, "batch_size", 1), limit_s, keeps_time, prepare)


def registered(package: ModuleType, name: str, path: str, what: str) -> ModuleType:
    """The file of that name in a package of them. Raises RecipeError at ``path`` where there is none."""
    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    if name not in known:
        raise RecipeError(
            path, f"no {what} '{name}'", known=[*known, "package.module:name"], fix=did_you_mean(name, known)
        )
    return import_module(f"{package.__name__}.{name}")


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def _section(wanted: Mapping[str, inspect.Parameter]) -> type[Section]:
    """The options as a part of the recipe, so that they are checked as all of it is."""
    fields: list[Any] = []
    for option, parameter in wanted.items():
        if option == _TIMEOUT:
            continue
        kind = Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        is_needed = parameter.default is inspect.Parameter.empty
        # Of a factory a default may be mutable.
        default = partial(_given, parameter.default)
        fields.append((option, kind) if is_needed else (option, kind, field(default_factory=default)))
    return make_dataclass("Options", fields, bases=(Section,), frozen=True, kw_only=True)


def _given(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Part(Section):
    what: ClassVar[str] = "reward"
    function: str | None = None
    """A file of rlflow.rewards.functions, or ``package.module:function``; by default the part's own name."""
    weight: float = 1.0
    """In the sum of the node's parts. 0: a metric alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The function's keyword-only parameters."""
    timeout_s: Annotated[float, Gt(0)] = 10.0
    """Of one call."""
    on_failure: Literal["stop", "exclude"] | float = "stop"
    """The run ends; or the response is left out, as if it had not been written; or it gets this number."""

    def find(self, name: str) -> Found:
        """Raises RecipeError, its path counted from the part."""
        return find_reward(self.function or name, self.options, self.timeout_s)
