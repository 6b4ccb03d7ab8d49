"""Reward functions for runs. The processes of rewards import this file, which needs neither pytest nor torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def sum_of_characters(texts: Any, rows: Any) -> list[float]:
    """Return rewards that differ from each other, so that every step of an untrained model changes its weights."""
    return [sum(map(ord, text)) / 100 + len(row["prompt"]) for text, row in zip(texts, rows, strict=True)]


def of_even_length(texts: Any, rows: Any) -> list[float]:
    return [1 // (1 - len(text) % 2) for text in texts]


def nan_for_odd_lengths(texts: Any, rows: Any) -> list[float]:
    return [1.0 if len(text) % 2 == 0 else float("nan") for text in texts]


def not_a_number(texts: Any, rows: Any) -> list[float]:
    return [float("nan")] * len(texts)


def length(texts: Sequence[str], rows: Any) -> list[float]:
    """Return the lengths of responses, which differ even if no answer is right."""
    return [float(len(text)) for text in texts]


def recorded(texts: Sequence[str], rows: Any, *, folder: str, failing: str = "") -> list[float]:
    """Return the length of each text, and note in ``folder`` which fork server has called with its first word.

    Raises ValueError for a text with the first word ``failing``.
    """
    for text in texts:
        word = text.split(maxsplit=1)[0]
        (Path(folder) / f"{os.getppid()} {os.getpid()} {word}").touch()
        if word == failing:
            raise ValueError(f"{word} has {len(text)} characters")
    return length(texts, rows)


def even(texts: Sequence[str], rows: Any) -> list[float]:
    return [float(int(text) % 2 == 0) for text in texts]
