"""Loads reward functions by name and checks their options.

``RewardTerm`` is one entry of a reward node's ``functions``: a function, its weight, and how its failures are handled.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from annotated_types import Ge, Le

from rlflow.errors import RecipeError, first_line
from rlflow.extras import check_extra
from rlflow.plugins import builtin_module, load_object
from rlflow.rewards import functions
from rlflow.rewards.base import LoadedCallable, Row, any_row, no_preparation
from rlflow.rewards.styles import (
    STYLES,
    JudgedResponse,
    StyleName,
    await_all,
    check_own_style,
    check_style,
    missing_column,
    with_accepted,
)
from rlflow.schema import Seconds, Section, parse

T = TypeVar("T")

# A function with this parameter receives its time limit. It comes from the recipe's term, not from the options.
_TIMEOUT = "timeout_s"
# A function with one of these receives it for each response.
_OF_RESPONSES = {"token_ids": "token_ids", "finish_reasons": "finish_reason"}
# Responses in one call of an async function, which is likely to wait for a service about all of them at once.
_ASYNC_BATCH_SIZE = 256
# Responses in one call of a function that takes lists: more than one, so that a single value for all is noticed.
_LIST_BATCH_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class RewardTerm(Section):
    """One term of a node's weighted sum of rewards."""

    kind: ClassVar[str] = "reward"
    function: str | None = None
    """A file of rlflow.rewards.functions, or ``package.module:function``; by default the term's own name."""
    weight: Annotated[float, Ge(-1e6), Le(1e6)] = 1.0
    """The term's factor in the sum. A term with weight 0 is only a metric."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The function's keyword-only parameters; with another style any that the library does not pass."""
    style: StyleName = "rlflow"
    """The library that the function was written for, which decides how it is called."""
    timeout_s: Seconds = 10.0
    """Seconds that one call may take."""
    on_failure: Literal["stop", "exclude"] | float = "stop"
    """``stop`` ends the run, ``exclude`` leaves the response out of training, and a number is used as the reward."""

    def load(self, name: str) -> LoadedCallable:
        """Load the function. Raises RecipeError with a path relative to this term."""
        if self.style != "rlflow":
            return _load_of_style(self.function or name, self.style, self.options, self.timeout_s)
        return load_reward(self.function or name, self.options, self.timeout_s)


def load_reward(name: str, options: Mapping[str, Any], timeout_s: float) -> LoadedCallable:
    """Load a reward function of rlflow's own style with its options.

    ``name`` is a file of rlflow.rewards.functions, or ``package.module:function``. Raises RecipeError at the paths
    ``function`` and ``options``.
    """
    module = None
    if ":" in name:
        function = _load_function(name)
    else:
        module = builtin_module(functions, name, "function", "reward")
        if hasattr(module, "EXTRA"):
            check_extra(module.EXTRA, "function", f"reward '{name}'")
        function = module.reward
    with _readable(name):
        check_own_style(name, function)
        parameters = _option_parameters(function)
        arguments = vars(parse(_options_section(parameters), options, "options"))
    if check := getattr(module, "check", None):
        check(**arguments)
    prepare, check_row = getattr(module, "prepare", no_preparation), getattr(module, "check_row", any_row)
    enforces_timeout = _TIMEOUT in parameters
    if enforces_timeout:
        arguments[_TIMEOUT] = timeout_s
    asked = {option: field for option, field in _OF_RESPONSES.items() if option in parameters}
    function_with_options = partial(function, **arguments)
    return LoadedCallable(
        partial(_call_with_responses, function_with_options, asked)
        if asked
        else partial(_call_with_rows, function_with_options),
        _batch_size(function),
        timeout_s,
        reads_tokens=bool(asked),
        enforces_timeout=enforces_timeout,
        prepare=_with_options(prepare, arguments),
        check_row=_with_options(check_row, arguments),
    )


def _load_of_style(name: str, style_name: StyleName, options: Mapping[str, Any], timeout_s: float) -> LoadedCallable:
    """Load a function that was written for another library."""
    if ":" not in name:
        raise RecipeError("style", f"'{name}' is a reward of rlflow", fix="remove style")
    style, function = STYLES[style_name], _load_function(name)
    with _readable(name):
        columns = check_style(name, function, style, options)
        call = partial(style.call, with_accepted(function, options))
    check_row = partial(missing_column, columns)
    batch_size = _batch_size(function, _LIST_BATCH_SIZE if style.takes_lists else 1)
    return LoadedCallable(call, batch_size, timeout_s, reads_tokens=True, check_row=check_row)


def _load_function(name: str) -> Callable[..., Any]:
    function = load_object(name, "function")
    if not callable(function):
        raise RecipeError("function", f"'{name}' is not a function", fix="write package.module:function")
    return cast(Callable[..., Any], function)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn any error that a function's parameters raise into a RecipeError."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:  # inspect, dataclasses and pydantic raise many errors for a user's annotations
        raise RecipeError(
            "function",
            f"the options of '{name}' cannot be read ({first_line(error)})",
            fix="annotate its keyword-only parameters with types that a recipe can hold",
        ) from None


def _with_options(hook: Callable[..., T], arguments: Mapping[str, Any]) -> Callable[..., T]:
    """Return the function with the options that it has parameters for."""
    return partial(hook, **{option: arguments[option] for option in _option_parameters(hook)})


def _batch_size(function: Callable[..., Any], default: int = 1) -> int:
    default = _ASYNC_BATCH_SIZE if inspect.iscoroutinefunction(function) else default
    return getattr(function, "batch_size", default)


def _call_with_rows(function: Callable[..., Any], texts: Sequence[str], rows: Sequence[Row]) -> Iterable[Any]:
    values: Iterable[Any]
    [values] = await_all([function(texts, rows)])
    return values


def _call_with_responses(
    function: Callable[..., Any], asked: Mapping[str, str], texts: Sequence[str], responses: Sequence[JudgedResponse]
) -> Iterable[Any]:
    """Call the function with rows, and with the field of responses that each of its parameters asks for."""
    lists = {option: [getattr(response, field) for response in responses] for option, field in asked.items()}
    return _call_with_rows(partial(function, **lists), texts, [response.row for response in responses])


def _option_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of ``function``, which are its options in a recipe."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return {parameter.name: parameter for parameter in parameters if parameter.kind is keyword_only}


def _options_section(parameters: Mapping[str, inspect.Parameter]) -> type[Section]:
    """Build a section of the recipe from parameters, so that options are checked like every other key."""
    fields: list[Any] = []
    for option, parameter in parameters.items():
        if option == _TIMEOUT or option in _OF_RESPONSES:
            continue
        annotation = Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        is_required = parameter.default is inspect.Parameter.empty
        # A default factory, because a dataclass refuses mutable defaults.
        default = field(default_factory=partial(_identity, parameter.default))
        fields.append((option, annotation) if is_required else (option, annotation, default))
    return make_dataclass("Options", fields, bases=(Section,), frozen=True, kw_only=True)


def _identity(value: Any) -> Any:
    return value
