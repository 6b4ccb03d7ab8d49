from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge

from rlflow.errors import RecipeError
from rlflow.schema import Section, parse


@dataclass(frozen=True, kw_only=True)
class Part(Section):
    size: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    rate: float = 1.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Whole(Section):
    name: str
    parts: Mapping[str, Part]
    other: Part | None = None


def test_lists_become_tuples_and_whole_numbers_floats() -> None:
    whole = parse(Whole, {"name": "x", "parts": {"a": {"size": 2, "rate": 3, "names": ["p"]}}}, "")
    assert whole == Whole(name="x", parts={"a": Part(size=2, rate=3.0, names=("p",))})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "x", "parts": {"a": {"siz": 2}}}, "at.parts.a.siz: unknown key.\n  Known: names, rate, size.\n"),
        ({"name": "x", "parts": {}, "other": {"rat": 2}}, "at.other.rat: unknown key.\n  Known: names, rate, size.\n"),
        ({"name": "x", "parts": {"a": {"size": 0}}}, "at.parts.a.size: 0 is not valid: input should be 'auto', or "),
        ({"name": "x", "parts": {"a": {"size": True}}}, "at.parts.a.size: True is not valid"),
        ({"name": "x", "parts": {"a": {"rate": float("nan")}}}, "at.parts.a.rate: nan is not valid"),
        ({"name": "x", "parts": {"a": {"rate": "1"}}}, "at.parts.a.rate: '1' is not valid"),
        ({"name": "x", "parts": {"a": {"names": ["p", 3]}}}, "at.parts.a.names.1: 3 is not valid"),
        ({"name": 1, "parts": {}}, "at.name: 1 is not valid"),
        ({"parts": {}}, "at.name: is missing."),
        ({"name": "x", "parts": {"a\u200b": {}}}, "at.parts: has the character U+200B, which is not shown as text."),
        ({"name": "x", "parts": {"\ufeffa": {}}}, "at.parts: has the character U+FEFF, which is not shown as text."),
        ({"name": "\u202ex", "parts": {}}, "at.name: has the character U+202E, which is not shown as text."),
    ],
)
def test_what_is_wrong_is_named(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse(Whole, mapping, "at")
    assert str(raised.value).startswith(message)


def test_texts_may_have_characters_without_a_width() -> None:
    """Thai breaks lines at U+200B, and Arabic needs U+061C."""
    assert parse(Whole, {"name": "a\u200bb\u061c", "parts": {}}, "at").name == "a\u200bb\u061c"
