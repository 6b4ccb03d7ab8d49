"""Reward functions for runs. The processes of rewards import this file, which needs neither pytest nor torch."""

from collections.abc import Sequence
from typing import Any


def first_digit(texts: Any, rows: Any) -> list[float]:
    return [sum(map(ord, text)) / 100 + len(row["prompt"]) for text, row in zip(texts, rows, strict=True)]


def of_even_length(texts: Any, rows: Any) -> list[float]:
    return [1 // (1 - len(text) % 2) for text in texts]


def length(texts: Sequence[str], rows: Any) -> list[float]:
    """Something in which responses differ: no answer is right."""
    return [float(len(text)) for text in texts]
