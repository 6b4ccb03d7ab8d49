"""Recipes whose options are valid one by one, and that would learn nothing."""

from collections.abc import Callable

import pytest

import rlflow
from rlflow.errors import UserError
from tests.conftest import SETS_OF_RECIPES
from tests.helpers import load


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        rlflow.compile(load("recipe=grpo_tiny", *overrides))
    return str(caught.value)


def test_recipes_that_learn_nothing(refusals: Callable[[str], None]) -> None:
    refusals("learn_nothing")


def test_a_trained_role_is_not_its_own_reference() -> None:
    reference = "graph.reference={node: logprobs, role: actor}"
    with pytest.raises(UserError) as caught:
        rlflow.compile(load("recipe=dr_grpo_tiny", reference, "graph.update.kl_coef=0.1"))
    assert str(caught.value) == (
        "graph.reference.role: the role 'actor' is trained, so it cannot be its own reference.\n  Fix: a role of its "
        "own with the same model; with adapters, node: base_logprobs."
    )


@pytest.mark.parametrize(
    "override",
    [
        *("roles.actor.optimizer.learning_rate=1e30", "roles.actor.optimizer.weight_decay=1e9"),
        *("graph.update.kl_coef=1e30", "graph.update.num_epochs=100000", "graph.update.clip_eps=5"),
        "graph.rollouts.temperature=1e30",
    ],
)
def test_sizes_that_no_run_has(override: str) -> None:
    assert refusal(override).startswith(override.partition("=")[0] + ": ")


@pytest.mark.slow
def test_options_without_an_effect_or_with_another_one(refusals: Callable[[str], None]) -> None:
    refusals("without_effect")


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("ppo_tiny", "graph.update.critic_warmup=3"),
        ("dapo_tiny", "graph.shaped.max_tokens=3"),
        ("dpo_tiny", "data.columns={chosen: rejected, rejected: chosen}"),
        ("grpo_tiny", "roles.actor.colocate=[actor,rollout,reference]"),
    ],
)
def test_options_that_some_users_want(recipe: str, override: str) -> None:
    rlflow.compile(load(f"recipe={recipe}", override), "local")


def test_one_sample_in_each_minibatch_is_possible() -> None:
    rlflow.compile(load("recipe=grpo_tiny", "graph.update.num_minibatches=1024"))


def test_a_warm_up_that_is_longer_than_the_run_is_a_warning() -> None:
    def warnings(*overrides: str) -> tuple[str, ...]:
        return rlflow.compile(load(*overrides), "local").prediction.warnings

    # 5e-4 is reached after 10 steps, and the rate rises by a tenth of it in each.
    path = "roles.actor.optimizer.warmup_steps"
    line = f"{path}: the run ends after 9 of 10 steps of warm-up, at a learning rate of 0.00045"
    assert line in warnings("recipe=grpo_tiny", "steps=9")
    assert line in warnings("recipe=ppo_tiny", "graph.update.critic_warmup=111")
    assert warnings("recipe=grpo_tiny", "steps=10") == ()
    alone = "graph.update.critic_warmup: all 5 steps train the critic alone, and none trains the policy"
    assert alone in warnings("recipe=ppo_tiny", "graph.update.critic_warmup=5", "steps=5")


# The hosts of recipes that need more than two.
LARGE = {"gspo_235b_a22b": "8x8", "dpo_deepseek_v3": "32x8", "gspo_deepseek_v3": "32x8"}


@pytest.mark.parametrize("names", SETS_OF_RECIPES)
def test_a_short_trial_of_each_recipe_is_planned(names: list[str]) -> None:
    refused = {}
    for name in names:
        recipe = load(f"recipe={name}")
        shorter = ["steps=1", "data.batch_size=4", *["evaluation.num_prompts=10"] * (recipe.evaluation is not None)]
        fewer_samples = ["graph.rollouts.group_size=2"] * ("group_size" in recipe.graph.get("rollouts", {}))
        for trial in (shorter, fewer_samples):
            try:
                cluster = "local" if name.endswith("tiny") else LARGE.get(name, "2x8")
                rlflow.compile(load(f"recipe={name}", *trial), cluster)
            except UserError as error:
                refused[name, *trial] = str(error)
    assert refused == {}


def test_options_that_a_file_does_not_read() -> None:
    """They are no mistake: a recipe that starts from another one has its options."""
    plan = rlflow.compile(load("recipe=grpo_tiny", "data.source=mine.jsonl"), "local")
    expected = "data.options: only functions have options, so 'mine.jsonl' does not read them"
    assert expected in plan.prediction.warnings
    assert rlflow.compile(load("recipe=grpo_tiny"), "local").prediction.warnings == ()
