"""Parses a mapping into a frozen dataclass, strictly, with errors that name the path in the recipe."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlflow.errors import RecipeError, did_you_mean

T = TypeVar("T")
# Arrays count in 32 bits.
Count = Annotated[int, Ge(1), Le(2**31 - 1)]
Coefficient = Annotated[float, Ge(0), Le(100)]
"""The factor of a term that is added to another one, such as a penalty."""


class Section:
    """The base of every part of a recipe. It allows no unknown keys, no coercion, no NaN and no infinity."""

    hints_for_other_names: ClassVar[Mapping[str, str]] = {}
    """Names that papers and other libraries use for a key, with the hint that an error gives for each."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def parse(kind: type[T], mapping: Mapping[str, Any], path: str) -> T:
    """Build ``kind``, a dataclass derived from Section, from the ``mapping`` at ``path`` in the recipe.

    Raises RecipeError for an unknown or missing key or a value of the wrong type or size.
    """
    try:
        # JSON, because strict validation accepts a mapping as a dataclass and a list as a tuple only in JSON.
        hashable: Any = kind  # types are hashable, but mypy checks the type's instances
        parsed: T = _adapter(hashable).validate_json(json.dumps(mapping))
        return parsed
    except ValidationError as error:
        raise _recipe_error(kind, mapping, path, error) from None


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
        return RecipeError(where, "unknown key", known=sorted(known), fix=hint or did_you_mean(key, known))
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        items, place = _value_at(mapping, first["loc"][:-1])
        where = ".".join(filter(None, [path, place]))
        return RecipeError(where, f"{items!r} is not valid: expected more than {len(items)} items")
    value, place = _value_at(mapping, first["loc"])
    where = ".".join(filter(None, [path, place]))
    if first["type"] == "missing":
        return RecipeError(where, "is missing", fix=f"add {where}=...")
    expected = {_lower_first(d["msg"]) for d in details if _value_at(mapping, d["loc"])[1] == place}
    return RecipeError(where, f"{value!r} is not valid: {', or '.join(sorted(expected))}")


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
