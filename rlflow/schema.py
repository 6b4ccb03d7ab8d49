"""Parses a mapping into a frozen dataclass, strictly, with errors that name the path in the recipe."""

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Le, Lt, MinLen, Unit
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlflow.errors import RecipeError, did_you_mean

T = TypeVar("T")
# Arrays count in 32 bits.
Count = Annotated[int, Ge(1), Le(2**31 - 1)]
CountOrZero = Annotated[int, Ge(0), Le(2**31 - 1)]
Steps = Annotated[Count, Unit("steps")]
Text = Annotated[str, MinLen(1)]
Coefficient = Annotated[float, Ge(0), Le(100)]
"""The factor of a term that is added to another one, such as a penalty."""
# Ranges end far beyond every use, where a number is a mistake of typing and would only overflow or change nothing.
Divergence = Annotated[float, Ge(1e-9), Le(1e4)]
"""A target of a divergence in nats, of a token or of a response."""
ClipDistance = Annotated[float, Ge(1e-6), Le(1e9)]
"""A distance at which a ratio or a value is clipped, without a limit of its own."""
ClipShare = Annotated[float, Ge(1e-6), Lt(1)]
"""A distance below 1 at which a ratio is clipped."""
Temperature = Annotated[float, Ge(0.01), Le(10)]
"""A temperature at which responses differ. vLLM raises a smaller one to this, or takes the likeliest tokens."""
TopP = Annotated[float, Ge(0.01), Le(1)]
"""The share of probability that sampling is limited to. A smaller one takes the likeliest tokens."""
# A week: no call takes longer, and timers overflow on numbers such as 1e300.
Seconds = Annotated[float, Ge(0.001), Le(7 * 24 * 3600), Unit("seconds")]
Minutes = Annotated[float, Ge(0.001), Le(7 * 24 * 60), Unit("minutes")]

# Metadata of a section's field.
OPERATIONAL: Mapping[str, bool] = {"operational": True}
"""The option changes how a run is carried out, and not what it trains."""
MAY_CHANGE: Mapping[str, bool] = {"may_change": True}
"""Each step reads the option anew, so a resumed run may change it."""

# Characters that turn the direction of the text after them, so that it reads differently from what it is.
_TURNING = frozenset(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
# Characters without a width, which make different names look the same. Prompts in Thai, Arabic or Hebrew need some.
_INVISIBLE = frozenset(map(chr, [0x00AD, 0x061C, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF]))
_LONGEST_SHOWN = 200
"""Characters of a wrong value that an error shows."""
_FIXES: Mapping[str, str] = {
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use a number above {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use a number below {lt}",
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "int_parsing_size": "use a smaller number",
    "float_type": "write a number, without quotes",
    "finite_number": "write a finite number",
    "bool_type": "write true or false",
    "string_type": "write a text; quote it if it looks like a number",
    "string_too_short": "write a text that is not empty",
    "literal_error": "use {expected}",
    "too_long": "use {max_length} items or less",
    "tuple_type": "write a list: [A, B]",
    "dict_type": "write keys with values: {{KEY: VALUE}}",
    "dataclass_type": "write keys with values: {{KEY: VALUE}}",
}
"""The fix for each kind of error of pydantic, with the names of its bounds."""


class Section:
    """The base of every part of a recipe. It allows no unknown keys, no coercion, no NaN and no infinity."""

    hints_for_other_names: ClassVar[Mapping[str, str]] = {}
    """Names that papers and other libraries use for a key, with the hint that an error gives for each."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def parse(kind: type[T], mapping: Mapping[str, Any], path: str) -> T:
    """Build ``kind``, a dataclass derived from Section, from the ``mapping`` at ``path`` in the recipe.

    Raises RecipeError for an unknown or missing key or a value of the wrong type or size.
    """
    check_values(mapping, path)
    try:
        # JSON, because strict validation accepts a mapping as a dataclass and a list as a tuple only in JSON.
        hashable: Any = kind  # types are hashable, but mypy checks the type's instances
        parsed: T = _adapter(hashable).validate_json(json.dumps(mapping))
        return parsed
    except ValidationError as error:
        raise _recipe_error(kind, mapping, path, error) from None


def check_values(value: Any, path: str) -> None:
    """Raise RecipeError for a value that a plan or a terminal cannot show as it is, wherever a recipe has it.

    Such are control characters, which may change what a terminal shows; lone surrogates, which no file can hold; keys
    that are not texts; and numbers that JSON does not have. Texts may have line breaks, tabs and characters without a
    width; keys may not.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(path, f"{value} is not valid: input should be a finite number", fix="write a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fact = f"{_shown(value)} is not valid: input should be a number of 64 bits"
        raise RecipeError(path, fact, fix="use a smaller number")
    if isinstance(value, str):
        _check_characters(value.translate({ord(each): None for each in "\n\r\t"}), path)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                fix = "quote it, as in 'on': 1" if isinstance(key, bool) else f"write '{key}'"
                raise RecipeError(path or "recipe", f"the key {key!r} is not a text", fix=fix)
            _check_characters(key, path, _TURNING | _INVISIBLE)
            check_values(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_values(inner, f"{path}.{index}")


def _check_characters(text: str, path: str, refused: frozenset[str] = _TURNING) -> None:
    # ASCII is checked first, because most texts are.
    if text.isascii() and text.isprintable():
        return
    for character in text:
        # The categories are control characters, surrogates, and separators of lines and paragraphs.
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in refused:
            fact = f"has the character U+{ord(character):04X}, which is not shown as text"
            raise RecipeError(path or "recipe", fact, fix="remove it")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _recipe_error(kind: type, mapping: Mapping[str, Any], path: str, error: ValidationError) -> RecipeError:
    """Return the error for the first invalid value, with the messages of all branches of a union."""
    details = error.errors(include_url=False)
    first = details[0]
    if first["type"] == "unexpected_keyword_argument":
        *parents, key = (str(part) for part in first["loc"])
        owner = _follow(kind, parents)
        known = [field.name for field in fields(owner) if field.init] if is_dataclass(owner) else []
        where = ".".join(filter(None, [path, *parents, key]))
        hint = getattr(owner, "hints_for_other_names", {}).get(key)
        if "." in key:
            return RecipeError(where, "a key in a file has no dots", fix=f"write {nested(key)}")
        fix = hint or did_you_mean(key, known) or "use one of the known keys, or remove it"
        return RecipeError(where, "unknown key", known=sorted(known), fix=fix)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        items, place = _value_at(mapping, first["loc"][:-1])
        where = ".".join(filter(None, [path, place]))
        fact = f"{_shown(items)} is not valid: expected more than {len(items)} items"
        return RecipeError(where, fact, fix="add the missing items")
    value, place = _value_at(mapping, first["loc"])
    where = ".".join(filter(None, [path, place]))
    if first["type"] == "missing":
        return RecipeError(where, "is missing", fix=f"add {where}=...")
    here = [detail for detail in details if _value_at(mapping, detail["loc"])[1] == place]
    expected = {_lower_first(detail["msg"]) for detail in here}
    fixes = {_FIXES[each["type"]].format(**each.get("ctx", {})) for each in here if each["type"] in _FIXES}
    fix = ", or ".join(sorted(fixes)) or "write what is expected here"
    return RecipeError(where, f"{_shown(value)} is not valid: {', or '.join(sorted(expected))}", fix=fix)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _value_at(mapping: Any, loc: tuple[int | str, ...]) -> tuple[Any, str]:
    """Return the value at ``loc`` and its path, without the labels that pydantic adds for branches of a union."""
    names: list[str] = []
    value: Any = mapping
    for part in loc:
        if isinstance(value, Mapping) and (part in value or part is loc[-1]):
            value = value.get(part)
        elif isinstance(value, tuple | list) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        else:
            continue
        names.append(str(part))
    return value, ".".join(names)


def nested(key: str) -> str:
    """Return the keys that a key with dots stands for on the command line, as a file has them."""
    *parents, last = key.split(".")
    return "".join(f"{parent}: {{" for parent in parents) + f"{last}: ..." + "}" * len(parents)


def _follow(kind: Any, parents: list[str]) -> Any:
    """Return the dataclass below ``kind`` at these field names; skip keys of mappings and labels of unions."""
    for name in parents:
        inner = {f.name: f.type for f in fields(kind)}.get(name) if is_dataclass(kind) else None
        if inner is not None:
            kind = _dataclass_in(inner)
    return kind


def _dataclass_in(annotation: Any) -> Any:
    if is_dataclass(annotation):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _dataclass_in(argument)) is not None:
            return found
    return None


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
