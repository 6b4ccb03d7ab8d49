"""Changes of a recipe that a resumed run accepts or refuses."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from rlflow.compiler.continuation import check_continuation, experiment_of, is_same_but_longer
from rlflow.errors import RecipeError
from tests.helpers import load


def experiment(*overrides: str) -> dict[str, Any]:
    return experiment_of(load(*overrides))


@pytest.mark.parametrize(
    "override",
    [
        "steps=400",
        "lr=1.0e-5",
        "roles.actor.optimizer.schedule=constant",
        "data.batch_size=64",
        "evaluation.every=10",
        "evaluation=null",
        "checkpoints.every=3",
        "roles.actor.micro_batch_tokens=512",
    ],
)
def test_options_that_each_step_reads_may_change(override: str) -> None:
    check_continuation(experiment(), experiment(override), "runs/a")


@pytest.mark.parametrize(
    ("override", "path", "values"),
    [
        ("n=4", "graph.rollouts.group_size", "8, this recipe has 4"),
        ("seed=1", "seed", "0, this recipe has 1"),
        (
            "roles.actor.optimizer.betas=[0.9,0.95]",
            "roles.actor.optimizer.betas",
            "[0.9, 0.98], this recipe has [0.9, 0.",
        ),
        ("models.policy.recipe=sft_tiny", "models.policy.recipe.", ""),
    ],
)
def test_what_may_not_is_named_with_both_values(override: str, path: str, values: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check_continuation(experiment(), experiment(override), "runs/a")
    message = str(raised.value)
    assert re.match(rf"resume: 'runs/a' was trained with {re.escape(path)}\S* ?{re.escape(values)}", message), message
    assert "Fix: " in message


def test_unfinished_rollouts_hold_the_batch_size() -> None:
    before, now = (experiment("overlap.max_staleness=1", *more) for more in ((), ("data.batch_size=64",)))
    with pytest.raises(RecipeError, match=r"trained with data\.batch_size 128, this recipe has 64"):
        check_continuation(before, now, "runs/a")


def test_a_missing_optimizer_has_the_defaults() -> None:
    before, now = experiment("~roles.actor.optimizer"), experiment("~roles.actor.optimizer", "lr=1.0e-3")
    assert "optimizer" not in before["roles"]["actor"]
    check_continuation(before, now, "runs/a")


def test_the_last_run_of_a_recipe_may_be_longer_and_no_other() -> None:
    assert is_same_but_longer(experiment(), experiment("steps=400", "checkpoints.every=3"))
    assert not is_same_but_longer(experiment(), experiment("lr=1.0e-5"))


def test_options_at_their_defaults_do_not_count() -> None:
    """So a checkpoint of a version without an option continues in one that has it."""
    assert experiment("roles.actor.optimizer.weight_decay=0.0", "data.overlong=error") == experiment()
    every_option = json.loads(json.dumps(asdict(load())))
    del every_option["models"]["policy"]["architecture"]
    check_continuation(every_option, experiment(), "runs/a")
    with pytest.raises(RecipeError, match=r"trained with data\.overlong \"error\", this recipe has \"drop\""):
        check_continuation(every_option, experiment("data.overlong=drop"), "runs/a")
    with pytest.raises(RecipeError, match=r"trained with roles\.actor\.lora null, this recipe has nothing, and 7 more"):
        check_continuation(experiment(), experiment("roles.actor.lora={}"), "runs/a")
