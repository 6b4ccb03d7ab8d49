"""Recipes whose options are valid one by one, and that would learn nothing."""

import pytest

import rlflow
from rlflow.errors import UserError
from tests.helpers import load


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        rlflow.compile(load("recipe=grpo_tiny", *overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "roles.rollout.follows=null",
            "roles.rollout.follows: graph.update trains 'actor' on responses of 'rollout', which never gets its "
            "weights.\n  Fix: roles.rollout.follows=actor.",
        ),
        (
            "roles.reference.follows=actor",
            "roles.reference.follows: the reference would get the weights of 'actor' after every step, so that they "
            "never differ.\n  Fix: roles.reference.follows=null.",
        ),
        (
            "graph.rollouts.temperature=0",
            "graph.rollouts.temperature: with 0 all responses to a prompt are the same, and graph.update learns from "
            "their differences.\n  Fix: graph.rollouts.temperature=1.",
        ),
        (
            "graph.rollouts.group_size=2000000000",
            "graph.rollouts.group_size: 2000000000 responses to each of 128 prompts are more than 2147483647.\n"
            "  Fix: smaller groups, or a smaller data.batch_size.",
        ),
        (
            "graph.update.num_minibatches=1025",
            "graph.update.num_minibatches: 1025 minibatches are more than the 1024 samples of a step.\n"
            "  Fix: use 1024 or fewer.",
        ),
        (
            "graph.update.clip_eps_high=0.1",
            "graph.update.clip_eps_high: 0.1 is less than clip_eps, which is 0.2.\n  Fix: use 0.2 or more.",
        ),
        (
            "graph.rewards={function: null, functions: {exact: {weight: 0}}}",
            "graph.rewards.functions: the weights of all functions are 0, and so is every reward.\n  Fix: weight: 1 "
            "for the function that counts.",
        ),
    ],
)
def test_refused(override: str, expected: str) -> None:
    assert refusal(override) == expected


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


@pytest.mark.parametrize(
    ("recipe", "override", "expected"),
    [
        (
            "grpo_tiny",
            "graph.update.critic_warmup=3",
            "graph.update.critic_warmup: 3 steps would train nothing: no node trains a critic.\n"
            "  Fix: graph.update.critic_warmup=0, or roles.actor.optimizer.warmup_steps.",
        ),
        (
            "grpo_tiny",
            "steps=9",
            "roles.actor.optimizer.warmup_steps: 10 steps are longer than the run, which trains 'actor' for 9.\n"
            "  Fix: roles.actor.optimizer.warmup_steps=9 or less, or steps=10 or more.",
        ),
        (
            "ppo_tiny",
            "graph.update.critic_warmup=111",
            "roles.actor.optimizer.warmup_steps: 10 steps are longer than the run, which trains 'actor' for 9.\n"
            "  Fix: roles.actor.optimizer.warmup_steps=9 or less, or steps=121 or more.",
        ),
        (
            "distill_tiny",
            "roles.teacher.model=policy",
            "roles.teacher.model: has the weights with which 'actor' starts, so that there is nothing to learn from "
            "it.\n  Fix: name a better model.",
        ),
        (
            "dapo_tiny",
            "graph.shaped.max_tokens=6",
            "graph.shaped.max_tokens: 6 is more than graph.rollouts.max_tokens, which is 5.\n"
            "  Fix: graph.shaped.max_tokens=5.",
        ),
        (
            "grpo_tiny",
            "graph.rewards.function=environment",
            "graph.rewards.function: no environment gives rewards to the responses of graph.rollouts.\n"
            "  Fix: another function, or a node 'converse' whose environment gives rewards.",
        ),
        (
            "remax_tiny",
            "graph.greedy_rewards.function=number",
            "graph.greedy_rewards: scores the greedy response in another way than graph.rewards scores the others.\n"
            "  Fix: the same options as in graph.rewards.",
        ),
        (
            "remax_tiny",
            "graph.greedy.max_tokens=1",
            "graph.greedy.max_tokens: 1 differs from graph.rollouts.max_tokens, which is 5.\n"
            "  Fix: graph.greedy.max_tokens=5.",
        ),
        (
            "dpo_tiny",
            "data.columns={rejected: chosen}",
            "data.columns: chosen and rejected are both 'chosen', so that all pairs are ties.\n"
            "  Fix: name two columns: {chosen: COLUMN, rejected: OTHER}.",
        ),
        (
            "dpo_tiny",
            "evaluation.temperature=0.5",
            "evaluation.temperature: pairs are given, and no responses are generated.\n  Fix: leave it out.",
        ),
        (
            "grpo_7b",
            "data.max_prompt_tokens=200000",
            "data.max_prompt_tokens: prompts of 200000 tokens leave no room for responses: the model has 32768 "
            "positions.\n  Fix: use less than 32768.",
        ),
        (
            "grpo_tiny",
            "graph.rollouts.temperature=0.001",
            "graph.rollouts.temperature: 0.001 is so low that engines take the likeliest token.\n"
            "  Fix: use 0.01 or more, or 0.",
        ),
        (
            "grpo_tiny",
            "roles.reference.offload=optimizer",
            "roles.reference.offload: 'reference' is never trained, so it has no optimizer state.\n"
            "  Fix: roles.reference.offload=auto, or weights.",
        ),
        (
            "grpo_tiny",
            "roles.actor.colocate=[actor]",
            "roles.actor.colocate: names no other role.\n  Fix: name roles that share its GPUs, or [] for none.",
        ),
        (
            "grpo_tiny",
            "roles.actor.colocate=[rollout,rollout]",
            "roles.actor.colocate: names a role more than once.\n  Fix: roles.actor.colocate=[rollout].",
        ),
    ],
)
def test_options_without_an_effect_or_with_another_one(recipe: str, override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        rlflow.compile(load(f"recipe={recipe}", override))
    assert str(caught.value) == expected


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


@pytest.mark.parametrize("overrides", [["steps=10"], ["steps=9", "roles.actor.optimizer.warmup_steps=9"]])
def test_a_warm_up_as_long_as_the_run_reaches_its_learning_rate(overrides: list[str]) -> None:
    rlflow.compile(load("recipe=grpo_tiny", *overrides), "local")


def test_options_that_a_file_does_not_read() -> None:
    """They are no mistake: a recipe that starts from another one has its options."""
    plan = rlflow.compile(load("recipe=grpo_tiny", "data.source=mine.jsonl"), "local")
    expected = "data.options: only functions have options, so 'mine.jsonl' does not read them"
    assert expected in plan.prediction.warnings
    assert rlflow.compile(load("recipe=grpo_tiny"), "local").prediction.warnings == ()
