"""A model's ``config.json`` as a mapping. The file may come from a stranger, so its size and depth are limited."""

import json
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError, first_line

FIX = "correct config.json, or give the model an architecture"
# The largest files of models list the layers that are quantized.
_LARGEST_MIB = 4
_MOST_LEVELS = 64


def read_config(file: Path, where: str) -> dict[str, Any]:
    """Return the content of a ``config.json``. Raises RecipeError, at ``where``, for a file that is none."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST_MIB * 2**20 + 1)
        if len(text) > _LARGEST_MIB * 2**20:
            raise RecipeError(where, f"'{file}' is larger than {_LARGEST_MIB} MiB", fix=FIX)
        content = json.loads(text)
    except RecipeError:
        raise
    except RecursionError:
        raise _depth_error(file, where) from None
    except (OSError, ValueError) as error:
        raise RecipeError(where, f"'{file}' cannot be read ({first_line(error)})", fix=FIX) from None
    if not isinstance(content, dict):
        raise RecipeError(where, f"'{file}' is not the configuration of a model, an object of JSON", fix=FIX)
    level: list[Any] = [content]
    for _ in range(_MOST_LEVELS):
        level = [inner for outer in level for inner in _inner(outer)]
    if level:
        raise _depth_error(file, where)
    return content


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _depth_error(file: Path, where: str) -> RecipeError:
    return RecipeError(where, f"'{file}' is nested too deeply, more than {_MOST_LEVELS} levels", fix=FIX)
