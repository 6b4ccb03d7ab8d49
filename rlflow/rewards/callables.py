"""Loads reward functions by name and checks their options.

``RewardTerm`` is one entry of a reward node's ``functions``: a function, its weight, and how its failures are handled.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from rlflow.errors import RecipeError, first_line
from rlflow.extras import check_extra
from rlflow.plugins import builtin_module, load_object
from rlflow.rewards import functions
from rlflow.rewards.base import LoadedCallable, no_preparation
from rlflow.schema import Seconds, Section, parse

# A function with this parameter receives its time limit. It comes from the recipe's term, not from the options.
_TIMEOUT = "timeout_s"


@dataclass(frozen=True, kw_only=True)
class RewardTerm(Section):
    """One term of a node's weighted sum of rewards."""

    kind: ClassVar[str] = "reward"
    function: str | None = None
    """A file of rlflow.rewards.functions, or ``package.module:function``; by default the term's own name."""
    weight: Annotated[float, Ge(-1e6), Le(1e6)] = 1.0
    """The term's factor in the sum. A term with weight 0 is only a metric."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The function's keyword-only parameters."""
    timeout_s: Seconds = 10.0
    """Seconds that one call may take."""
    on_failure: Literal["stop", "exclude"] | float = "stop"
    """``stop`` ends the run, ``exclude`` leaves the response out of training, and a number is used as the reward."""

    def load(self, name: str) -> LoadedCallable:
        """Load the function. Raises RecipeError with a path relative to this term."""
        return load_reward(self.function or name, self.options, self.timeout_s)


def load_reward(name: str, options: Mapping[str, Any], timeout_s: float) -> LoadedCallable:
    """Load a reward function with its options.

    ``name`` is a file of rlflow.rewards.functions, or ``package.module:function``. Raises RecipeError at the paths
    ``function`` and ``options``.
    """
    module = None
    if ":" in name:
        function = load_object(name, "function")
    else:
        module = builtin_module(functions, name, "function", "reward")
        if hasattr(module, "EXTRA"):
            check_extra(module.EXTRA, "function", f"reward '{name}'")
        function = module.reward
    if not callable(function):
        raise RecipeError("function", f"'{name}' is not a function", fix="write package.module:function")
    try:
        parameters = _option_parameters(function)
        arguments = vars(parse(_options_section(parameters), options, "options"))
    except RecipeError:
        raise
    except Exception as error:  # inspect, dataclasses and pydantic raise many errors for a user's annotations
        raise RecipeError(
            "function",
            f"the options of '{name}' cannot be read ({first_line(error)})",
            fix="annotate its keyword-only parameters with types that a recipe can hold",
        ) from None
    if check := getattr(module, "check", None):
        check(**arguments)
    prepare = getattr(module, "prepare", no_preparation)
    prepare = partial(prepare, **{option: arguments[option] for option in _option_parameters(prepare)})
    enforces_timeout = _TIMEOUT in parameters
    if enforces_timeout:
        arguments[_TIMEOUT] = timeout_s
    call = partial(function, **arguments)
    return LoadedCallable(call, getattr(function, "batch_size", 1), timeout_s, enforces_timeout, prepare)


def _option_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of ``function``, which are its options in a recipe."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def _options_section(parameters: Mapping[str, inspect.Parameter]) -> type[Section]:
    """Build a section of the recipe from parameters, so that options are checked like every other key."""
    fields: list[Any] = []
    for option, parameter in parameters.items():
        if option == _TIMEOUT:
            continue
        annotation = Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        is_required = parameter.default is inspect.Parameter.empty
        # A default factory, because a dataclass refuses mutable defaults.
        default = field(default_factory=partial(_identity, parameter.default))
        fields.append((option, annotation) if is_required else (option, annotation, default))
    return make_dataclass("Options", fields, bases=(Section,), frozen=True, kw_only=True)


def _identity(value: Any) -> Any:
    return value
