"""The largest sizes that fit, and what pinned values cost."""

from dataclasses import replace

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler import compile_recipe
from rlflow.compiler.what_if import cost_of_pins, largest_sizes
from rlflow.recipe import Recipe
from rlflow.recipe.compose import load_cluster
from rlflow.report.plan_facts import facts
from rlflow.resources.time.speed import Efficiency
from tests.helpers import load, problem_of


def sizes(recipe: Recipe, cluster: str) -> dict[str, str]:
    """Return the largest value of each size."""
    return dict(each.split("=") for each in largest_sizes(problem_of(recipe, cluster)))


@pytest.mark.slow
def test_the_largest_response_is_the_last_that_fits() -> None:
    """Five percent more is tight, or does not fit."""
    base = ("recipe=grpo_7b", "roles.actor.offload=none", "roles.actor.sequence_parallel_size=1")
    found = sizes(load(*base), "1x6@a100_40gb")
    tokens = int(found["graph.rollouts.max_tokens"])
    assert tokens > 2048
    assert (
        rlflow.compile(load(*base, f"graph.rollouts.max_tokens={tokens}"), "1x6@a100_40gb").prediction.verdict == "FITS"
    )
    longer = rlflow.compile(load(*base, f"graph.rollouts.max_tokens={round(1.05 * tokens)}"), "1x6@a100_40gb")
    assert longer.prediction.verdict == "TIGHT"


@pytest.mark.slow
def test_the_number_of_samples_does_not_fill_gpus() -> None:
    """Samples are divided into micro-batches, so that a batch 64 times as large fits too."""
    found = sizes(load("recipe=grpo_7b"), "1x8")
    assert found["data.batch_size"] == f"{64 * 256} or more"
    assert found["graph.rollouts.group_size"] == f"{64 * 8} or more"
    # The model has 32768 positions, of which the prompt takes 512.
    assert found["graph.rollouts.max_tokens"] == "32256, the model's positions"


@pytest.mark.slow
def test_what_pinned_values_cost() -> None:
    slow = problem_of(load("recipe=grpo_7b", "roles.rollout.gpus=1", "roles.rollout.colocate=[]"), "1x8")
    told = cost_of_pins(slow)
    assert told is not None
    assert told.startswith("without pinned values a step takes")
    assert "roles.rollout.gpus=8" in told
    chosen = rlflow.compile(load("recipe=grpo_7b"), "1x8").roles["actor"].layout.zero_stage
    same = problem_of(load("recipe=grpo_7b", f"roles.actor.zero_stage={chosen}"), "1x8")
    assert cost_of_pins(same) == "the pinned values cost less than 1% of the step time"
    assert cost_of_pins(problem_of(load("recipe=grpo_7b"), "1x8")) is None


@pytest.mark.slow
def test_a_plan_answers_with_its_own_calibration() -> None:
    """The answer about pinned values counts the longer step on slower GPUs."""
    cluster = load_cluster("1x8")
    slow = {"h100_80gb": replace(Efficiency(), matmul=Efficiency().matmul / 2)}
    recipe = load("recipe=grpo_7b", "roles.rollout.tensor_parallel_size=4")
    measured = compile_recipe(recipe, cluster, slow)
    assert measured.calibration == slow
    console = Console(width=200)
    with console.capture() as printed:
        console.print(facts(measured, 200, explain=True))
    free = compile_recipe(load("recipe=grpo_7b"), cluster, slow)
    assert f"without pinned values a step takes {free.prediction.step_seconds:.3g} s" in printed.get()
