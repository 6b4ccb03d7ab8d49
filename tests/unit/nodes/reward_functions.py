"""Reward functions for tests. Each pool of processes imports them, and nothing of pytest with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.rewards.base import Failure, Outcome

Rows = Sequence[Mapping[str, Any]]


def good(texts: Sequence[str], rows: Rows) -> list[int]:
    return [int(text) for text in texts]


def tenfold(texts: Sequence[str], rows: Rows, *, times: float = 10) -> list[float]:
    return [times * float(text) for text in texts]


def one_fails(texts: Sequence[str], rows: Rows) -> list[Outcome]:
    return [Failure("unavailable", "is out") if text == "2" else 5.0 for text in texts]


def raising(texts: Sequence[str], rows: Rows) -> list[float]:
    raise KeyError("solution")


def too_few(texts: Sequence[str], rows: Rows) -> list[float]:
    return [1.0] * (len(texts) - 1)


def not_a_number(texts: Sequence[str], rows: Rows) -> list[float]:
    return [float("nan") if text == "2" else 1.0 for text in texts]


def not_numbers(texts: Sequence[str], rows: Rows) -> list[str]:
    return ["yes"] * len(texts)


def number_as_text(texts: Sequence[str], rows: Rows) -> list[str]:
    return ["1.0"] * len(texts)


def large(texts: Sequence[str], rows: Rows, *, size: float = 2e38) -> list[float]:
    return [size * float(text == "2") for text in texts]


def unreadable(texts: Sequence[str], rows: Rows) -> list[Outcome]:
    return [Failure("unreadable", "found no 'answer' in the row (None)") if text == "2" else 1.0 for text in texts]
