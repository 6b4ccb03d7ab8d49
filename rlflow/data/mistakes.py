"""Errors about the rows and the columns of a data set."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.recipe import Data

Rows = Sequence[Mapping[str, Any]]


def missing_column_error(data: Data, path: str, column: str, row: Mapping[str, Any]) -> RecipeError:
    """Return the error for a column that the data does not have; ``path`` is the key that names it."""
    fix = did_you_mean(column, row) or f"name the column that the data set has: {path}=COLUMN"
    return RecipeError(path, f"no column '{column}' in '{data.source}'", known=sorted(row), fix=fix)


def row_error(data: Data, row: int, fact: str, fix: str = "remove the row") -> RecipeError:
    """Return the error for a row, counted from 0; ``fact`` continues a sentence about it."""
    return RecipeError("data.source", f"row {row} of '{data.source}' {fact}", fix=fix)
