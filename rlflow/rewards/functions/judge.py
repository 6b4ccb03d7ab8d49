"""The score that a language model gives, asked over any endpoint that speaks the OpenAI protocol."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from string import Formatter
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.rewards.base import Failure, Outcome, Row, batched, text_of
from rlflow.rewards.http import Url, post

# Responses of a call are asked about all together.
_AT_ONCE = 32
# From here on a field in braces names a part of the column's value.
_INSIDE = re.compile(r"[.\[]")


@batched(_AT_ONCE)
def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    url: Url,
    model: str,
    prompt: str,
    timeout_s: float,
    score: re.Pattern[str] = re.compile(r"(?i)score:\s*(-?\d+(?:\.\d+)?)"),
    max_tokens: Annotated[int, Ge(1)] = 1024,
    temperature: Annotated[float, Ge(0)] = 0.0,
    api_key: str = "OPENAI_API_KEY",
) -> list[Outcome]:
    """``url``: up to ``/v1``. ``prompt``: with ``{response}`` and, in braces, columns of the row. ``score``: its last
    match in the judge's answer has the number as its first group, or is it where there are no groups. ``api_key``: the
    environment variable that has it, where there is one."""
    key = os.environ.get(api_key)
    columns = _columns(prompt)
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def judged(text: str, row: Row) -> Outcome:
        if failure := next(
            (value for value in map(partial(text_of, row), columns) if isinstance(value, Failure)), None
        ):
            return failure
        message = {"role": "user", "content": prompt.format(**{**row, "response": text})}
        asked = {"model": model, "messages": [message], "max_tokens": max_tokens, "temperature": temperature}
        return _score(post(f"{url}/chat/completions", asked, timeout_s, headers), score)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(judged, texts, rows))


def _columns(prompt: str) -> list[str]:
    """Return the columns of a row that ``prompt`` names in braces."""
    names = (name for _, name, _, _ in Formatter().parse(prompt) if name)
    return [column for column in (_INSIDE.split(name)[0] for name in names) if column != "response"]


def _score(answer: Any, pattern: re.Pattern[str]) -> Outcome:
    if isinstance(answer, Failure):
        return answer
    try:
        said = str(answer["choices"][0]["message"]["content"])
    except (LookupError, TypeError):
        return Failure("invalid", f"got no chat completion from the judge, but {str(answer)[:80]}")
    *_, found = [None, *pattern.finditer(said)]
    if found is None:
        return Failure("invalid", f"found no score in what the judge said: {said[-80:]!r}")
    score = found[1 if pattern.groups else 0]
    try:
        return float(score)
    except (TypeError, ValueError):
        return Failure("invalid", f"found no number where the score is in what the judge said: {str(score)[:80]!r}")
