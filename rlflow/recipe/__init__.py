"""The data classes of a recipe, and the stages compose and load that read one."""

from rlflow.recipe.options import RunOptions, Trace, Tune
from rlflow.recipe.recipe import (
    Checkpoints,
    Data,
    Expect,
    Model,
    Optimizer,
    Recipe,
    Role,
)

__all__ = ["Checkpoints", "Data", "Expect", "Model", "Optimizer", "Recipe", "Role", "RunOptions", "Trace", "Tune"]
