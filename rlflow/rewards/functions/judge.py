"""The score that a judge model gives, over any endpoint that speaks the OpenAI protocol."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from string import Formatter
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlflow.errors import RecipeError
from rlflow.rewards.answers import column_text
from rlflow.rewards.base import Failure, Outcome, Row, batched
from rlflow.rewards.http import Url, check_variable, key_headers, post
from rlflow.schema import Count, Text

# Responses of one call, which are judged concurrently.
_CONCURRENCY = 32
# Where a field in braces stops naming the column and starts naming a part of its value.
_PART_OF_VALUE = re.compile(r"[.\[]")
# "Score: 8", also in bold. A number that goes on, as in 1,000 or 50%, is no match rather than another number.
_SCORE = re.compile(
    r"(?i)score[\s*_]*[:=][\s*_]*([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?![\w%]|[.,]\d|\s*[-\u2013]\s*\d)"
)
_ENDPOINT = "/chat/completions"


def check(*, url: str, prompt: str, api_key: str, **options: Any) -> None:
    """Raise RecipeError for an endpoint, the name of a variable or a prompt that no request could use."""
    del options
    if url.rstrip("/").endswith(_ENDPOINT):
        fix = f"leave {_ENDPOINT} out: url: {url.rstrip('/').removesuffix(_ENDPOINT)}"
        raise RecipeError("options.url", f"ends with {_ENDPOINT}, which is added to it", fix=fix)
    check_variable("options.api_key", api_key)
    _check_prompt(prompt)


def check_row(row: Row, *, prompt: str) -> Failure | None:
    """Return why a column that the prompt names cannot be shown to the judge; None if all can."""
    values = [column_text({name: _value(name, row)}, name) for name in _columns(prompt)]
    return next((value for value in values if isinstance(value, Failure)), None)


def _columns(prompt: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(prompt) if name and name != "response"]


def _check_prompt(prompt: str) -> None:
    """Raise RecipeError for a prompt whose braces cannot be replaced, or which does not show the response."""
    fix = "name {response} and columns in braces; write other braces twice: {{ and }}"
    try:
        parts = [(name, spec or "", kind) for _, name, spec, kind in Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise RecipeError("options.prompt", f"its braces cannot be read ({error})", fix=fix) from None
    for name, spec, conversion in parts:
        shown = name if conversion is None else f"{name}!{conversion}"
        if not name or name.isdecimal() or conversion not in (None, "s", "r", "a"):
            raise RecipeError("options.prompt", f"'{{{shown}}}' names no column", fix=fix)
        if (name == "response" or conversion) and not _can_format_text(spec):
            raise RecipeError("options.prompt", f"'{{{shown}:{spec}}}' is no format of a text", fix=f"{{{shown}}}")
    if not any(_PART_OF_VALUE.split(name)[0] == "response" for name, _, _ in parts):
        raise RecipeError("options.prompt", "the judge would not see the response", fix="name {response} in it")


def _can_format_text(spec: str) -> bool:
    try:
        format("", spec)
    except ValueError:
        return False
    return True


@batched(_CONCURRENCY)
def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    url: Url,
    model: Text,
    prompt: str,
    timeout_s: float,
    score: re.Pattern[str] = _SCORE,
    max_tokens: Count = 1024,
    temperature: Annotated[float, Ge(0), Le(10)] = 0.0,
    api_key: str = "OPENAI_API_KEY",
) -> list[Outcome]:
    """Ask the judge about each response and return the scores in its answers.

    ``url`` ends with ``/v1``. ``model``, ``max_tokens`` and ``temperature`` are those of the request. ``prompt`` names
    ``{response}`` and columns of the row in braces. The last match of ``score`` in the judge's answer is used: its
    first group is the number, or the whole match if it has no groups. ``api_key`` names the environment variable that
    holds the key; without it no key is sent.
    """
    headers = key_headers(api_key)

    def judge(text: str, row: Row) -> Outcome:
        if failure := check_row(row, prompt=prompt):
            return failure
        message = {"role": "user", "content": prompt.format(**{**row, "response": text})}
        body = {"model": model, "messages": [message], "max_tokens": max_tokens, "temperature": temperature}
        return _score(post(f"{url}{_ENDPOINT}", body, timeout_s, headers), score)

    with ThreadPoolExecutor(_CONCURRENCY) as threads:
        return list(threads.map(judge, texts, rows))


def _value(name: str, row: Row) -> Any:
    """Return what a field of the prompt names, such as ``answer`` or ``answers[0]``; None if the row lacks it."""
    try:
        return Formatter().get_field(name, (), row)[0]
    except (LookupError, AttributeError, TypeError):
        return None


def _score(answer: Any, pattern: re.Pattern[str]) -> Outcome:
    if isinstance(answer, Failure):
        return answer
    try:
        content = str(answer["choices"][0]["message"]["content"])
    except (LookupError, TypeError):
        return Failure("invalid", f"expected a chat completion from the judge, got {str(answer)[:80]}")
    *_, match = [None, *pattern.finditer(content)]
    if match is None:
        return Failure("invalid", f"found no score in the judge's answer: {content[-80:]!r}")
    score = match[1 if pattern.groups else 0]
    try:
        return float(score)
    except (TypeError, ValueError):
        return Failure("invalid", f"expected a number as the judge's score, got {str(score)[:80]!r}")
