"""Rules about the options of a run: what it records and tunes."""

from rlflow.errors import RecipeError
from rlflow.recipe import Recipe, RunOptions


def check_run(recipe: Recipe, options: RunOptions) -> None:
    """Check the options of a run against its recipe. Raises RecipeError."""
    traced = () if isinstance(options.trace, bool) else options.trace
    for option, recorded in (("trace", traced), ("profile", options.profile)):
        if strays := [step for step in recorded if not 1 <= step <= recipe.steps]:
            fact = f"step {strays[0]} comes after the last step of the run, {recipe.steps}"
            if strays[0] < 1:
                fact = f"step {strays[0]} comes before the first step of a run, 1"
            raise RecipeError(option, fact, fix=f"steps from 1 to {recipe.steps}")
    if options.tune and recipe.overlap.max_staleness:
        fact = "compares the times of steps, which overlap.max_staleness lets overlap"
        raise RecipeError("tune", fact, fix="tune=false, or overlap.max_staleness=0")
