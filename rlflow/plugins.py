"""``package.module:name``: something of the user's own, named in a recipe."""

from importlib import import_module
from typing import Any

from rlflow.errors import RecipeError, first_line


def load_object(name: str, path: str) -> Any:
    """What ``name`` names; ``path`` is where the recipe does. Raises RecipeError."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the user's own module raises
        raise RecipeError(
            path,
            f"'{name}': the module '{module_name}' cannot be imported ({first_line(error)})",
            fix="put it on PYTHONPATH",
        ) from None
    if not hasattr(module, attribute):
        raise RecipeError(path, f"'{name}': '{module_name}' has no '{attribute}'", fix="write package.module:name")
    return getattr(module, attribute)
