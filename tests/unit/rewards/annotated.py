"""Reward functions with options of all kinds, their annotations as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Thing:
    """Nothing that a recipe can hold."""


def good(texts: Sequence[str], rows: Sequence[Any], *, factor: float = 2.0, words: list[str] = ["a"]) -> list[float]:  # noqa: B006
    return [factor * len(words)] * len(texts)


def of_a_thing(texts: Sequence[str], rows: Sequence[Any], *, thing: Thing) -> list[float]:
    return []


def of_nothing_known(texts: Sequence[str], rows: Sequence[Any], *, thing: Unknown) -> list[float]:  # type: ignore[name-defined]  # noqa: F821
    return []
