"""The ways to call a reward function: rlflow's own, and those of TRL, verl and OpenRLHF.

A function written for another library would often run without an error when it is called in rlflow's way, and return
wrong numbers. It is therefore recognised by its parameters, and called in its own way where the recipe says so.
"""

import asyncio
import atexit
import dis
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from rlflow.errors import RecipeError
from rlflow.rewards.base import Failure, Row

RENDERED_PROMPT = "rendered_prompt"
"""The column with the text of a prompt that the model has read, for functions that read it."""
SPECIAL_TOKENS = "special_tokens"
"""The column with the texts of the tokenizer's special tokens by their ids, which comes with the rendered prompt."""

StyleName = Literal["rlflow", "trl", "verl", "verl_batch", "openrlhf"]


@dataclass(frozen=True)
class JudgedResponse:
    """A response with everything that a function may ask about it besides its text."""

    row: Row
    token_ids: list[int]
    """With the end token, if the response has one."""
    finish_reason: Literal["stop", "length"]
    """``length`` if the response was cut at its limit."""


JudgedResponses = Sequence[JudgedResponse]
Sources = tuple[str, ...]
"""Columns of which any one is enough."""


@dataclass(frozen=True)
class Style:
    """The way in which a library calls reward functions: by names of arguments."""

    library: str
    mark: frozenset[str]
    """Parameters of which a function of this library has at least one."""
    passed: frozenset[str]
    """The arguments of every call, of which a function receives those that it has parameters for."""
    call: Callable[[Callable[..., Any], Sequence[str], JudgedResponses], Sequence[Any]]
    """Calls a function about responses, and returns a value for each."""
    passes_columns: bool = False
    """Columns of the data set are arguments, too."""
    takes_lists: bool = True
    """A call is about several responses."""
    reads_rendered_prompts: bool = False
    """Rows need the text of the prompt as the model has read it."""


def check_own_style(name: str, function: Callable[..., Any]) -> None:
    """Raise RecipeError unless the function takes ``texts`` and ``rows``, and options after them by name."""
    parameters = inspect.signature(function).parameters
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if [parameter.name for parameter in parameters.values() if parameter.kind not in by_name] == ["texts", "rows"]:
        return
    fact = f"'{name}' takes {_shown(function)}, expected (texts, rows), and options by name after '*'"
    short_name = name.rpartition(":")[2]
    fix = f"def {short_name}(texts, rows)"
    if style := next((style for style, known in STYLES.items() if known.mark & parameters.keys()), None):
        fact = f"'{name}' takes {_shown(function)}, as {STYLES[style].library} calls it; expected (texts, rows)"
        fix = f'functions: {{{short_name}: {{function: "{name}", style: {style}}}}}, or {fix}'
    raise RecipeError("function", fact, fix=fix)


def check_style(name: str, function: Callable[..., Any], style: Style, options: Mapping[str, Any]) -> list[Sources]:
    """Return the columns that the function reads and has no default for: for each, all that may stand in for it.

    Raises RecipeError, its path relative to a term of a reward, for a function that the style cannot call.
    """
    parameters, takes_all = inspect.signature(function).parameters, _takes_all(function)
    if not takes_all and not style.mark & parameters.keys():
        fact = f"'{name}' takes {_shown(function)}, expected {' or '.join(sorted(style.mark))} as in {style.library}"
        raise RecipeError("style", fact, fix="style: rlflow for (texts, rows), or another one")
    for option in options:
        if option in style.passed or not (takes_all or option in parameters):
            raise RecipeError(f"options.{option}", f"'{name}' takes no such option", fix="remove it")
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in options
    ]
    if style.passes_columns and ("trainer_state" in parameters or _reads(function, "trainer_state")):
        fact = f"'{name}' reads 'trainer_state', and there is no trainer of TRL here"
        raise RecipeError("function", fact, fix="remove 'trainer_state', with what follows from it")
    columns = [parameter for parameter in required if parameter not in style.passed]
    unknown = [column for column in columns if not style.passes_columns or column == "environments"]
    if unknown:
        fact = f"'{name}' needs '{unknown[0]}', which it does not receive here"
        raise RecipeError("function", fact, fix=f"give it a default, or options: {{{unknown[0]}: VALUE}}")
    read = [parameter for parameter in required if parameter in style.passed and _reads(function, parameter)]
    return [*(_SOURCES[parameter] for parameter in read if parameter in _SOURCES), *((column,) for column in columns)]


def missing_column(columns: Sequence[Sources], row: Row) -> Failure | None:
    """Return which column the row does not have; None if it has all."""
    nested = row.get("reward_model")
    names = {*row, *(f"reward_model.{name}" for name in (nested if isinstance(nested, Mapping) else ()))}
    for sources in columns:
        if not names.intersection(sources):
            return Failure("unreadable", f"found no '{sources[0]}' in the row (expected {' or '.join(sources)})")
    return None


def with_accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with its options; of the arguments of a call it receives those that it has parameters for."""
    names = None if _takes_all(function) else inspect.signature(function).parameters.keys()

    def call(**arguments: Any) -> Any:
        accepted = {name: value for name, value in arguments.items() if names is None or name in names}
        return function(**{**accepted, **options})

    return call


def await_all(results: Sequence[Any]) -> list[Any]:
    """Return the results; those of async functions are awaited at once."""
    if not any(inspect.isawaitable(result) for result in results):
        return list(results)
    return _event_loop().run_until_complete(_gather(results))


async def _gather(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*results))


@cache  # because a function may keep a session between calls, which belongs to one loop
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Return whether the function's own code uses the parameter, or takes an argument of this name out of others."""
    target = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
    arguments = [step.argval for step in dis.get_instructions(code)] if code else [name]
    return any(name == argument or (isinstance(argument, tuple) and name in argument) for argument in arguments)


def _takes_all(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _shown(function: Callable[..., Any]) -> str:
    """Return the names of the parameters, as in a definition."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(stars.get(parameter.kind, '') + parameter.name for parameter in parameters)})"


def _call_trl(function: Callable[..., Any], texts: Sequence[str], responses: JudgedResponses) -> Sequence[Any]:
    """Pass lists: prompts and completions, which are messages in conversations, and every column."""
    rows = [response.row for response in responses]
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row if name not in _NOT_COLUMNS}
    metrics: dict[str, float] = {}
    arguments = {
        "prompts": [row.get("prompt") for row in rows],
        "completions": [_completion(text, row) for text, row in zip(texts, rows, strict=True)],
        "completion_ids": [response.token_ids for response in responses],
        "log_metric": metrics.__setitem__,
        "log_extra": lambda column, values: None,
    }
    [values] = await_all([function(**columns, **arguments)])
    # TRL reads NaN as None.
    scores = [None if value is None or value != value else value for value in values]
    return [{"score": score, **metrics} for score in scores] if metrics else scores


def _completion(text: str, row: Row) -> Any:
    return [{"role": "assistant", "content": text}] if isinstance(row.get("prompt"), list) else text


def _call_verl(function: Callable[..., Any], texts: Sequence[str], responses: JudgedResponses) -> Sequence[Any]:
    """Call the function once for each response."""
    return await_all(
        [
            function(solution_str=text, **_verl_arguments(response.row))
            for text, response in zip(texts, responses, strict=True)
        ]
    )


def _call_verl_batch(function: Callable[..., Any], texts: Sequence[str], responses: JudgedResponses) -> Sequence[Any]:
    """Pass lists, as the reward manager ``batch`` does."""
    calls = [_verl_arguments(response.row) for response in responses]
    lists = {f"{name}s": [arguments[name] for arguments in calls] for name in calls[0]}
    [values] = await_all([function(solution_strs=list(texts), **lists)])
    return list(values)


def _verl_arguments(row: Row) -> dict[str, Any]:
    return {
        "data_source": row.get("data_source"),
        "ground_truth": _ground_truth(row),
        "extra_info": dict(row.get("extra_info") or {}),
    }


def _ground_truth(row: Row) -> Any:
    """Return what verl's functions compare with: the row's own, or its answer."""
    nested = row.get("reward_model")
    in_verl = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    return next((value for value in (row.get("ground_truth"), in_verl) if value is not None), row.get("answer"))


def _call_openrlhf(function: Callable[..., Any], texts: Sequence[str], responses: JudgedResponses) -> Sequence[Any]:
    """Pass lists of prompts, of prompts with their responses, and of labels."""
    prompts = [response.row[RENDERED_PROMPT] for response in responses]
    queries = [
        prompt + text + _last_special_token(response)
        for prompt, text, response in zip(prompts, texts, responses, strict=True)
    ]
    labels = [response.row.get("label", response.row.get("answer")) for response in responses]
    [result] = await_all([function(queries=queries, prompts=prompts, labels=labels)])
    if not isinstance(result, Mapping):
        return list(_numbers(result))
    extra_logs = result.get("extra_logs") or {}
    logs = {name: _numbers(log, len(texts)) for name, log in extra_logs.items()}
    rewards = _numbers(result["rewards"])
    return [
        {"score": reward, **{name: log[place] for name, log in logs.items()}} for place, reward in enumerate(rewards)
    ]


def _last_special_token(response: JudgedResponse) -> str:
    """Return the text of the response's end token, which OpenRLHF decodes too; empty for a response that was cut."""
    text: str = response.row[SPECIAL_TOKENS].get(response.token_ids[-1], "")
    return text


def _numbers(values: Any, count: int | None = None) -> Any:
    """Return a tensor, an array, a list or a number as an array, in which a single number may stand for ``count``."""
    # The import takes nearly half of the time in which a fork server starts.
    import numpy as np

    array = np.asarray(values, np.float64).ravel()
    return array if count is None else np.broadcast_to(array, count)


# The columns that an argument may come from.
_SOURCES: Mapping[str, Sources] = {
    "data_source": ("data_source",),
    "data_sources": ("data_source",),
    "ground_truth": ("ground_truth", "reward_model.ground_truth", "answer"),
    "ground_truths": ("ground_truth", "reward_model.ground_truth", "answer"),
    "labels": ("label", "answer"),
}
# Columns that TRL does not pass.
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})

STYLES: Mapping[str, Style] = {
    "trl": Style(
        library="TRL",
        mark=frozenset({"completions", "completion_ids"}),
        passed=frozenset({"prompts", "completions", "completion_ids", "log_metric", "log_extra"}),
        call=_call_trl,
        passes_columns=True,
    ),
    "verl": Style(
        library="verl",
        mark=frozenset({"solution_str"}),
        passed=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
        call=_call_verl,
        takes_lists=False,
    ),
    "verl_batch": Style(
        library="verl's reward manager 'batch'",
        mark=frozenset({"solution_strs"}),
        passed=frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
        call=_call_verl_batch,
    ),
    "openrlhf": Style(
        library="OpenRLHF",
        mark=frozenset({"queries"}),
        passed=frozenset({"queries", "prompts", "labels"}),
        call=_call_openrlhf,
        reads_rendered_prompts=True,
    ),
}
