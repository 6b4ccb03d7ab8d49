"""Recipes whose options are valid one by one, and that would learn nothing."""

from dataclasses import replace

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


def test_one_sample_in_each_minibatch_is_possible() -> None:
    rlflow.compile(load("recipe=grpo_tiny", "graph.update.num_minibatches=1024"))


def test_a_warm_up_that_the_run_does_not_reach_the_end_of() -> None:
    recipe = load("recipe=grpo_tiny")
    warning = "roles.actor.optimizer.warmup_steps: the warm-up of 10 steps is longer than the run, which has 9"
    assert warning in rlflow.compile(replace(recipe, steps=9)).prediction.warnings
    assert warning not in rlflow.compile(replace(recipe, steps=10)).prediction.warnings
