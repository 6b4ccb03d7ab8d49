"""Errors of the files of a model, as mistakes in the recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import RecipeError, first_line
from rlflow.recipe import Model


def check_folder(name: str, model: Model) -> None:
    """Raise RecipeError if the path of ``models.<name>`` is no folder, before the libraries that load it."""
    if model.path and model.path.startswith((".", "/", "~")) and not Path(model.path).is_dir():
        fact = f"'{model.path}' is not a folder"
        raise RecipeError(f"models.{name}.path", fact, fix="name a folder that save_pretrained wrote")


@contextmanager
def loading_from(name: str, path: str) -> Iterator[None]:
    """Turn any error in loading a model, tokenizer or configuration of ``models.<name>`` into a RecipeError."""
    try:
        yield
    except Exception as error:  # the libraries below raise errors of many kinds for a damaged file
        raise _loading_error(name, path, error) from None


def _loading_error(name: str, path: str, error: Exception) -> RecipeError:
    """Return the error for a model, tokenizer or configuration at ``path`` that transformers could not load."""
    where = f"models.{name}.path"
    if "trust_remote_code" in str(error):
        return RecipeError(
            where,
            f"'{path}' can only be loaded by running the Python files in it",
            fix=f"read these files, and if you trust them set models.{name}.trust_remote_code=true",
        )
    return RecipeError(
        where,
        f"'{path}' cannot be loaded ({first_line(error)})",
        fix="name a folder with a model, or a model on the hub",
    )
