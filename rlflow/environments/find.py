"""From the name of an environment to an object of it that has its options."""

from collections.abc import Mapping
from typing import Any

from rlflow.environments import classes
from rlflow.environments.base import Environment
from rlflow.errors import RecipeError
from rlflow.plugins import load_object
from rlflow.rewards.find import registered
from rlflow.schema import parse


def find_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """A file of rlflow.environments.classes, or ``package.module:Class``, before its first conversation.

    Raises RecipeError at the paths ``environment`` and ``options``.
    """
    path = "environment"
    kind = load_object(name, path) if ":" in name else registered(classes, name, path, "environment").ENVIRONMENT
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise RecipeError(
            path, f"'{name}' is not an Environment", fix="derive it from rlflow.environments.base.Environment"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise RecipeError(path, f"'{name}' has no {' and '.join(missing)}", fix="see docs/environments.md")
    return parse(kind, options, "options")
