"""The data classes of a recipe, and the stages compose and load that read one."""

from rlflow.recipe.recipe import (
    Checkpoints,
    Data,
    Expect,
    Model,
    Optimizer,
    Recipe,
    Role,
    Trace,
    Tune,
)

__all__ = ["Checkpoints", "Data", "Expect", "Model", "Optimizer", "Recipe", "Role", "Trace", "Tune"]
