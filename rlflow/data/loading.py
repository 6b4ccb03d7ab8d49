"""Reads the rows of a data set, for training and evaluation, with the columns that the recipe names."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rlflow.data.files import read_files_or_hub
from rlflow.data.generated import generated_rows
from rlflow.data.images import read_images
from rlflow.data.messages import split_answers
from rlflow.data.mistakes import Rows, missing_column_error
from rlflow.errors import RecipeError, first_line
from rlflow.plugins import load_object
from rlflow.recipe import Data
from rlflow.recipe.evaluation import Evaluation


def load_rows(data: Data, field: Literal["split", "eval_split"], *, sees_images: bool = True) -> Rows:
    """Read the rows of a split, and check their images if the model ``sees_images``. Raises RecipeError.

    Columns have the names that the recipe gives them, and the last turn of a conversation is split off its prompt.
    """
    split = getattr(data, field)
    rows = _call_function(data, split) if ":" in data.source else read_files_or_hub(data, field, split)
    if not rows:
        raise RecipeError(
            f"data.{field}", f"'{split}' of '{data.source}' has no rows", fix="choose another split or source"
        )
    for name, column in data.columns.items():
        if column not in rows[0] and column.partition(".")[0] not in rows[0]:
            raise missing_column_error(data, f"data.columns.{name}", column, rows[0])
    # Read from the original row, so that two columns can be swapped.
    columns = data.columns.items()
    renamed = [{**row, **{name: _value(row, column) for name, column in columns}} for row in rows]
    return split_answers(read_images(data, renamed) if sees_images else renamed, data.train_on)


def describe_rows(rows: Rows) -> str:
    """Return the number of rows and a digest of their values and their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, default=_same_everywhere).encode())
    return f"{len(rows)} rows with the digest {digest.hexdigest()[:12]}"


def _same_everywhere(value: Any) -> Any:
    """Return a value that JSON lacks in a form that is the same in every process, and complete."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    # The text of an object that has none of its own has an address.
    return str(value).partition(" at 0x")[0]


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field inside of it, such as ``reward_model.ground_truth``."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def load_held_out(
    data: Data, evaluation: Evaluation | None, *, sees_images: bool = True
) -> dict[str, tuple[Data, Rows]]:
    """Read the rows of all evaluation sets; return them with the data that they come from. Raises RecipeError."""
    if evaluation is None:
        return {}
    held_out = {}
    for name, chosen in evaluation.sets_with(data.eval_split).items():
        fields: dict[str, Any] = {"name": chosen.name, "options": chosen.options, "columns": chosen.columns}
        # A source of its own has none of the fields of the training data.
        fields = fields | {"source": chosen.source} if chosen.source else {key: x for key, x in fields.items() if x}
        of_set = replace(data, eval_split=chosen.split, **fields)
        with at_evaluation_set(name):
            rows = load_rows(of_set, "eval_split", sees_images=sees_images)
            held_out[name] = of_set, rows[: evaluation.prompts_of(chosen)]
    return held_out


@contextmanager
def at_evaluation_set(name: str) -> Iterator[None]:
    """Name an evaluation set's own keys, in place of those of ``data``, in a RecipeError raised inside."""
    try:
        yield
    except RecipeError as error:
        if name:
            for key in ("eval_split", "source", "name", "options", "columns"):
                of_set = f"evaluation.sets.{name}.{key.removeprefix('eval_')}"
                error.path = re.sub(rf"^data\.{key}\b", of_set, error.path)
                if error.notes["Fix"]:
                    error.notes["Fix"] = re.sub(rf"\bdata\.{key}\b", of_set, error.notes["Fix"])
        raise


def _call_function(data: Data, split: str) -> Rows:
    function = generated_rows(data.source) or load_object(data.source, "data.source")
    try:
        return list(function(split=split, **data.options))
    except RecipeError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RecipeError(
            "data.source", f"'{data.source}' failed ({first_line(error)})", fix="see data.options"
        ) from error
