"""Loads a user's own objects, which a recipe names as ``package.module:name``."""

from importlib import import_module
from typing import Any

from rlflow.errors import RecipeError, first_line


def load_object(name: str, path: str) -> Any:
    """Import the object ``package.module:name``. Raises RecipeError at ``path``, where the recipe names it."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise RecipeError(
            path,
            f"'{name}': the module '{module_name}' cannot be imported ({first_line(error)})",
            fix="put it on PYTHONPATH",
        ) from None
    if not hasattr(module, attribute):
        raise RecipeError(path, f"'{name}': '{module_name}' has no '{attribute}'", fix="write package.module:name")
    return getattr(module, attribute)
