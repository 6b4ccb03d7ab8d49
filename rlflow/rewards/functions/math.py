"""1 if the response's answer equals the row's ``answer`` mathematically, by the library math-verify; 0 otherwise."""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from rlflow.rewards.answers import Answer, column_answers, compare_any, missing_answer, plain_text, whole_number
from rlflow.rewards.base import Failure, Outcome, Row

EXTRA = "math-verify"

# A number with an exponent, in which the library would read e as Euler's number.
_EXPONENT = re.compile(r"(?<![\w.\\])\d+(?:\.\d*)?[eE][-+]?\d{1,2}(?![\w^])")
_PERCENT = re.compile(r"\$?([-+.,\d]+) ?\\?%\$?")

check_row = missing_answer


def prepare() -> None:
    """Import math-verify, which takes long."""
    import math_verify  # noqa: F401

    # It warns that its time limits are off: they use alarms, and the pool enforces the deadline instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Compare the answer in each response with the ``answer`` of its row.

    The row's ``answer`` is a number, LaTeX, a text whose last line is ``#### answer``, or a list of them, of which each
    is right. The answer in a response is the content of ``\\boxed{}``, or else the last part that can be read as an
    answer. Where the row's answer is 50%, 50 and 1/2 are right, too.
    """
    prepare()
    return [
        compare_any(column_answers(row, "answer"), partial(_equals, text))
        for text, row in zip(texts, rows, strict=True)
    ]


def _equals(text: str, answer: Answer) -> bool | Failure:
    from math_verify import verify

    plain = plain_text(answer).rpartition("####")[2].strip()
    if whole_number(plain) is not None:
        plain, text = _without_exponents(plain), _without_exponents(text)
    if text.strip() == plain:
        return True
    percent = _PERCENT.fullmatch(plain)
    forms = [f"{percent[1]}%", rf"{percent[1]}\%", percent[1], f"{percent[1]}/100"] if percent else [plain]
    candidates = [candidate for form in forms for candidate in _parse(_boxed(form))]
    # 3:00 is read as a division by zero, and then only its text can be compared.
    expected = [candidate for candidate in candidates if str(candidate) not in ("zoo", "nan")]
    if not expected:
        return Failure("unreadable", f"cannot read the row's answer {str(answer)[-80:]!r}")
    return bool(verify(expected, _parse(text), timeout_seconds=None, raise_on_error=True))


def _without_exponents(text: str) -> str:
    return _EXPONENT.sub(lambda number: format(Decimal(number[0]), "f"), text)


def _boxed(answer: str) -> str:
    """Return the row's answer in the form that math-verify parses most reliably."""
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    candidates: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return candidates
