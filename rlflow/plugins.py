"""Loads what a recipe names: built-in modules by their names, a user's own objects as ``package.module:name``."""

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from rlflow.errors import RecipeError, did_you_mean, first_line


def builtin_module(package: ModuleType, name: str, path: str, kind: str) -> ModuleType:
    """Import the module ``name`` of ``package``. Raises RecipeError at ``path`` when it does not exist.

    ``kind`` is the word for such modules in the error.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    if name not in known:
        raise RecipeError(
            path,
            f"no {kind} '{name}'",
            known=[*known, "package.module:name"],
            fix=did_you_mean(name, known) or "one of these",
        )
    return import_module(f"{package.__name__}.{name}")


def load_object(name: str, path: str) -> Any:
    """Import the object ``package.module:name``. Raises RecipeError at ``path``, where the recipe names it."""
    check_module(name, path)
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


def check_module(name: str, path: str) -> None:
    """Raise RecipeError if ``package.module:name`` belongs to Python itself, or is an address.

    None of Python's modules was made for a recipe, and some act when they are imported or called.
    """
    if "://" in name:
        raise RecipeError(path, f"'{name}' is an address", fix="download it, and name the file")
    module_name = name.partition(":")[0]
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        fact = f"'{name}': '{module_name}' belongs to Python, and a recipe may only name code that was made for it"
        raise RecipeError(path, fact, fix="name a module of your own, as package.module:name")
