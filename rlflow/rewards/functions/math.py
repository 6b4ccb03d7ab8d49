"""1 where the response's answer equals the row's ``answer`` mathematically, by the library math-verify."""

import logging
from collections.abc import Sequence
from typing import Any

from rlflow.rewards.base import Failure, Outcome, Row, text_of

EXTRA = "math-verify"


def prepare() -> None:
    """Imports what takes long."""
    import math_verify  # noqa: F401

    # Its own time limits are alarms, off here: whoever is over time is ended from outside.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """The row needs an ``answer``: a number, LaTeX, or a text whose last line is ``#### answer``. Of a response what is
    in a box counts, or else the last thing that can be read as an answer."""
    prepare()
    return [_compared(text, text_of(row, "answer")) for text, row in zip(texts, rows, strict=True)]


def _compared(text: str, answer: str | Failure) -> Outcome:
    from math_verify import verify

    if isinstance(answer, Failure):
        return answer
    wanted = _parsed(_boxed(answer))
    if not wanted:
        return Failure("unreadable", f"cannot read the row's answer {answer[-80:]!r}")
    return float(verify(wanted, _parsed(text), timeout_seconds=None, raise_on_error=True))


def _boxed(answer: str) -> str:
    """As it is read best."""
    answer = answer.rpartition("####")[2].strip()
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found
