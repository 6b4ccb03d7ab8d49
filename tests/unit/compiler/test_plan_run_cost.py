"""The cost of a run, and sweeps that are ranked by it."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.report.ranking import SweepOutcome, ranking_table
from rlflow.resources.cluster import Cluster
from tests.helpers import load


def priced(shape: str, price: float | None = 2.0) -> Cluster:
    cluster = load_cluster(shape)
    return replace(cluster, gpus={kind: replace(gpu, price_per_hour=price) for kind, gpu in cluster.gpus.items()})


@pytest.mark.slow
def test_a_run_is_all_steps_on_all_gpus_of_its_hosts() -> None:
    """The engine of one GPU leaves seven of its host idle, and they are paid for.

    Checkpoints after steps 80, 160 and 200.
    """
    plan = rlflow.compile(load("recipe=grpo_7b", "evaluation=null", "checkpoints.every=80"), priced("1x8"))
    hours = (200 * plan.prediction.step_seconds + 3 * plan.prediction.checkpoint_seconds) / 3600
    assert plan.cost.hours == pytest.approx(hours)
    assert plan.cost.gpu_hours == pytest.approx(8 * hours)
    assert plan.cost.price == pytest.approx(8 * hours * 2.0)
    assert plan.to_dict()["run"]["price"] == plan.cost.price
    small = rlflow.compile(load("recipe=grpo_tiny"), priced("1x8"))
    assert small.prediction.num_gpus == 1
    assert small.cost.price == pytest.approx(8 * small.cost.gpu_hours * 2.0)
    assert rlflow.compile(load("recipe=grpo_tiny"), "1x8").cost.price is None


def test_pauses_for_evaluations_and_checkpoints() -> None:
    """Evaluations before the first of 250 steps and after each 100, and the last; 7.6 billion parameters of 12 bytes.

    An evaluation has one response to each of 300 prompts, so it takes less than a step with 1024 responses.
    """
    evaluated = load(
        "recipe=grpo_7b", "steps=250", "evaluation={every: 100, num_prompts: 300}", "checkpoints.every=999"
    )
    plan = rlflow.compile(evaluated, "1x8")
    prediction = plan.prediction
    pauses = 4 * prediction.evaluation_seconds + prediction.checkpoint_seconds
    assert plan.cost.hours == pytest.approx((250 * prediction.step_seconds + pauses) / 3600)
    assert prediction.checkpoint_seconds == pytest.approx(12 * 7.62e9 / 5e8, rel=0.01)
    [generate, reward] = plan.workload.evaluation
    assert (generate.samples, generate.group_size, reward.samples) == (300, 1, 300)
    assert 0 < prediction.evaluation_seconds < prediction.nodes["rollouts"].seconds


def test_an_evaluation_of_pairs_scores_both_responses() -> None:
    tasks = rlflow.compile(load("recipe=dpo_tiny"), "local").workload.evaluation
    assert [(task.node, task.kind, task.samples) for task in tasks] == [
        ("reference", "score", 1000),
        ("update", "score", 1000),
    ]


def test_the_share_of_the_peak_and_the_time_of_a_token() -> None:
    """Six operations for each of 7.07 billion multiplied parameters and token; attention adds a few percent."""
    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8")
    update, rollouts = plan.prediction.nodes["update"], plan.prediction.nodes["rollouts"]
    assert update.mfu is not None
    task = next(task for task in plan.workload.tasks if task.node == "update")
    # A prompt is computed once for its group of eight.
    tokens = task.samples * (task.prompts.mean / 8 + task.responses.mean)
    by_hand = 6 * 7.07e9 * tokens / (update.seconds * 8 * 989.4e12)
    assert by_hand < update.mfu < 1.1 * by_hand
    assert rollouts.token_seconds is not None
    # The longest of 2048 tokens is generated one token after another, the last ones in smaller batches.
    assert 0.2 * rollouts.seconds < 2048 * rollouts.token_seconds < 3 * rollouts.seconds
    assert (update.token_seconds, rollouts.mfu) == (None, None)


def ranked(outcomes: list[SweepOutcome]) -> list[list[str]]:
    """Return the words of each row."""
    console = Console(width=120, file=io.StringIO(), highlight=False)
    console.print(ranking_table(outcomes))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines() if line.startswith("cluster=")]


def outcome(shape: str, plan: Plan, deadline_hours: float | None) -> SweepOutcome:
    return SweepOutcome((f"cluster={shape}",), plan, deadline_hours)


@pytest.mark.slow
def test_the_cheapest_of_those_that_meet_the_deadline_comes_first() -> None:
    """More hosts are faster and cost more; the cheapest of all is too late."""
    plans = {shape: rlflow.compile(load("recipe=grpo_7b"), priced(shape)) for shape in ("1x4", "1x8", "2x8")}
    hours = [plan.cost.hours for plan in plans.values()]
    assert hours == sorted(hours, reverse=True)
    between = (hours[0] + hours[1]) / 2
    rows = ranked([outcome(shape, plan, between) for shape, plan in plans.items()])
    assert [row[0] for row in rows] == ["cluster=1x8", "cluster=2x8", "cluster=1x4"]
    assert ["(late)" in row for row in rows] == [False, False, True]
    rows = ranked([outcome(shape, plan, None) for shape, plan in plans.items()])
    assert [row[0] for row in rows] == ["cluster=2x8", "cluster=1x8", "cluster=1x4"]
