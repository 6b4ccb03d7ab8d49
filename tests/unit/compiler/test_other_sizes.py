"""A plan with other sizes has the figures that the planner predicts for a recipe with pinned placement."""

import re
from itertools import product
from math import prod

import pytest

import rlflow
from rlflow.compiler.other_sizes import SizePoint, size_axes, size_points
from rlflow.compiler.plan import Plan
from tests.helpers import load


def points_of(plan: Plan) -> dict[tuple[int, ...], SizePoint]:
    return {point.sizes: point for point in size_points(plan, size_axes(plan))}


def peaks(plan: Plan) -> dict[str, float]:
    """Return the memory of each role on its fullest GPU."""
    found = plan.prediction.memory
    return {role: max(gib for gpus in found[role].peak_gib.values() for gib in gpus.values()) for role in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        pytest.param("grpo_7b", "1x8", id="colocated"),
        pytest.param("ppo_7b", "1x7+1x8", id="two pools on uneven hosts"),
        pytest.param("dpo_7b", "1x8", id="nothing is generated"),
        pytest.param("grpo_7b overlap.max_staleness=1", "2x8", id="ahead"),
    ],
)
def test_the_recipes_own_sizes_are_those_of_the_plan(recipe: str, cluster: str) -> None:
    name, *overrides = recipe.split()
    plan = rlflow.compile(load(f"recipe={name}", *overrides), cluster)
    axes = size_axes(plan)
    points = points_of(plan)
    assert list(points) == list(product(*(axis.values for axis in axes)))
    own = points[tuple(axis.values[axis.own] for axis in axes)]
    assert own.peak_gib == peaks(plan)
    predicted = plan.prediction
    assert (own.step_seconds, own.verdict) == (predicted.step_seconds, predicted.verdict)
    assert own.tokens_per_second_per_gpu == pytest.approx(predicted.tokens_per_second_per_gpu)


@pytest.mark.slow
def test_other_sizes_are_what_the_planner_says_of_a_recipe_that_pins_the_placement() -> None:
    plan = rlflow.compile(load("recipe=grpo_32b"), "2x8")
    engine, trained = (
        ("tensor_parallel_size", "gpu_memory_utilization"),
        ("micro_batch_tokens", "zero_stage", "offload"),
    )
    pins = [
        f"roles.{role}.{field}={value}"
        for role, placement in plan.roles.items()
        for field in (engine if role == "rollout" else trained)
        if (value := getattr(placement.layout, field)) is not None
    ]
    pins += [f"roles.{role}.gpus=16" for role in plan.roles] + ["roles.actor.gradient_checkpointing=true"]
    points = points_of(plan)
    for tokens, batch, group in ((8192, 512, 4), (1024, 128, 16), (2048, 256, 8)):
        sizes = [
            f"graph.rollouts.max_tokens={tokens}",
            f"data.batch_size={batch}",
            f"graph.rollouts.group_size={group}",
        ]
        again = rlflow.compile(load("recipe=grpo_32b", *pins, *sizes), "2x8")
        point = points[tokens, batch, group]
        assert point.step_seconds == pytest.approx(again.prediction.step_seconds)
        # An idle engine whose width is pinned counts with that width, and in a search with the widest.
        assert point.peak_gib == pytest.approx(peaks(again), abs=1.0)


@pytest.mark.slow
def test_longer_responses_are_tight_beyond_the_plans_limit_and_do_not_fit_far_beyond() -> None:
    overrides = ("graph.rollouts.max_tokens=4096", "roles.actor.gradient_checkpointing=false")
    plan = rlflow.compile(load("recipe=grpo_7b", *overrides), "1x6@a100_40gb")
    (limit,) = [int(line.split()[3]) for line in plan.prediction.limits if "(actor)" in line]
    assert 4096 < limit < 8192
    points = {point.sizes[0]: point for point in points_of(plan).values()}
    assert [points[tokens].verdict for tokens in (1024, 2048, 4096)] == ["FITS"] * 3
    assert points[8192].verdict == "TIGHT"
    assert re.match(r"actor needs \d+ GiB \(\d+ to \d+ within the error\) of \d+ GiB in update", points[8192].reason)
    assert points[4096].reason == ""
    assert points[16384].step_seconds is None
    # A sequence is a prompt of up to 512 tokens and a response.
    assert points[16384].reason.startswith("actor: ")
    assert "for 16896 tokens" in points[16384].reason


def test_sizes_stay_inside_the_models_positions() -> None:
    """Qwen2.5 has 32768 positions, of which the prompts of this recipe have 512."""
    responses, *_ = size_axes(rlflow.compile(load("recipe=grpo_7b", "graph.rollouts.max_tokens=20000"), "1x8"))
    assert responses.values == (5000, 10000, 20000, 32256)


def test_groups_keep_two_responses() -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny", "graph.rollouts.group_size=2"), "1x1@cpu")
    responses, batch, group = size_axes(plan)
    assert group.values == (2, 4)
    assert (responses.own, batch.own, group.own) == (2, 1, 0)
    assert len(points_of(plan)) == prod(len(axis.values) for axis in (responses, batch, group))


@pytest.mark.slow
def test_expected_lengths_grow_with_the_longest_response() -> None:
    """Twice the lengths in the same places take twice the decoding steps, and more than twice as long in attention."""
    plan = rlflow.compile(load("recipe=grpo_7b", "expect.response_tokens=[500,1500]"), "1x8")
    points = points_of(plan)
    axes = size_axes(plan)
    own = tuple(axis.values[axis.own] for axis in axes)
    double = points[2 * own[0], *own[1:]].step_seconds
    longer = rlflow.compile(
        load("recipe=grpo_7b", "expect.response_tokens=[1000,3000]", f"graph.rollouts.max_tokens={2 * own[0]}"), "1x8"
    )
    assert double == pytest.approx(longer.prediction.step_seconds, rel=0.1)
