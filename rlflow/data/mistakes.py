"""Errors about the rows and the columns of a data set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.recipe import Data

Rows = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def missing_column_error(data: Data, path: str, column: str, row: Mapping[str, Any]) -> RecipeError:
    """Return the error for a column that the data does not have; ``path`` is the key that names it."""
    fix = did_you_mean(column, row) or f"name the column that the data set has: {path}=COLUMN"
    return RecipeError(path, f"no column '{column}' in '{data.source}'", known=sorted(row), fix=fix)


def row_error(data: Data, row: int, fact: str, fix: str = "remove the row") -> RecipeError:
    """Return the error for a row, counted from 0; ``fact`` continues a sentence about it."""
    return RecipeError("data.source", f"row {row} of '{data.source}' {fact}", fix=fix)


def column_of(data: Data, rows: Rows, name: str) -> list[Any]:
    """Return the values of a column. Raises RecipeError for a row without one."""
    if name not in rows[0]:
        raise missing_column_error(data, f"data.columns.{name}", name, rows[0])
    values = [row.get(name) for row in rows]
    if None in values:
        row = values.index(None)
        is_pair = name == "prompt" and "chosen" in rows[row]
        more = ", and its chosen and rejected do not begin with the same one" if is_pair else ""
        raise row_error(data, row, f"has no '{name}'{more}")
    return values


def fix_for_texts(data: Data) -> str:
    """Return the fix for texts that a tokenizer or its chat template refuses."""
    no_system_role = ", or set data.system_prompt=null if the chat template has no system role"
    return "remove such rows" + (no_system_role if data.system_prompt is not None else "")


def converted_errors(data: Data, encode: Callable[[], T]) -> T:
    """Turn an error of a tokenizer into a RecipeError."""
    try:
        return encode()
    except Exception as error:  # tokenizers raise errors of many kinds
        raise RecipeError(
            "data.source",
            f"the tokenizer refuses a text of '{data.source}' ({first_line(error)})",
            fix=fix_for_texts(data),
        ) from None
