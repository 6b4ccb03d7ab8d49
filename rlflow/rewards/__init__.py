"""Functions from rollouts to numbers. One file a reward, with a function ``reward``; the file's name is its name.

A reward function takes the texts of B responses and the data set's rows that they answer, and returns B numbers.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rlflow.errors import RecipeError, did_you_mean
from rlflow.plugins import load_object

RewardFunction = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Sequence[float]]


def find_reward(name: str) -> RewardFunction:
    """A file of this folder, or ``package.module:function``. Raises RecipeError at the path ``function``."""
    function: RewardFunction
    if ":" in name:
        function = load_object(name, "function")
        return function
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise RecipeError(
            "function",
            f"no reward '{name}'",
            known=[*known, "package.module:function"],
            fix=did_you_mean(name, known),
        )
    function = import_module(f"{__name__}.{name}").reward
    return function
