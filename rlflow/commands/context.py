"""Finds the earlier run that ``resume`` continues, its steps and its cluster."""

import os
from contextlib import suppress
from pathlib import Path

from rlflow.compiler.continuation import experiment_of, is_same_but_longer
from rlflow.compiler.plan import read_plan
from rlflow.errors import RecipeError, UserError
from rlflow.recipe import Recipe
from rlflow.resources.cluster import Cluster


def find_run(resume: bool | str, recipe: Recipe, root: Path) -> Path | None:
    """Return the folder of the run to continue: the path ``resume``, or this recipe's newest run below ``root``.

    Return None when no run is continued. Raises RecipeError when no such run exists.
    """
    if resume is False:
        return None
    if resume is not True:
        folder = Path(os.path.expanduser(resume))
        if not resume or not (folder / "plan.json").is_file():
            fix = "resume=FOLDER with the folder of a run, as outputs/DATE/TIME, or leave out resume"
            raise RecipeError("resume", f"'{resume}' is not the folder of a run", fix=fix)
        return folder
    candidates = [path for path in root.glob("*/*/plan.json") if _is_run_of(recipe, path)]
    if not candidates:
        raise RecipeError(
            "resume",
            f"no run of this recipe with a checkpoint below '{root}'",
            fix="resume=FOLDER, which also allows another batch size or learning rate, or leave out resume",
        )
    return max(candidates, key=lambda path: path.stat().st_mtime).parent


def num_finished_steps(folder: Path) -> int:
    """Return the steps of the newest checkpoint in ``folder``; 0 without one."""
    from rlflow.runtime.checkpoint import checkpoint_step, checkpoints

    return max(map(checkpoint_step, checkpoints(folder)), default=0)


def cluster_of_run(folder: Path) -> Cluster | None:
    """Return the cluster that the run in ``folder`` was planned for; None if its plan cannot be read."""
    with suppress(UserError):
        return read_plan(folder / "plan.json").cluster
    return None


def _is_run_of(recipe: Recipe, path: Path) -> bool:
    with suppress(UserError):
        same = is_same_but_longer(experiment_of(read_plan(path).recipe), experiment_of(recipe))
        return same and any(path.parent.glob("**/checkpoints/step-*"))
    return False
