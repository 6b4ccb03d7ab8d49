"""Verdicts: plans with room for the error of predictions, plans without, and host memory that nobody stated."""

from dataclasses import replace

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.resources.planner.confidence import MEMORY_BANDS, TIME_ERROR, Kind
from tests.helpers import load
from tests.unit.report.test_plan_text import drawn


def fullest(plan: Plan, role: str) -> float:
    """Return the GiB of the role's fullest GPU."""
    return max(max(gpus.values()) for gpus in plan.prediction.memory[role].peak_gib.values())


@pytest.mark.slow
def test_a_plan_that_fits_has_room_for_the_whole_error() -> None:
    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8")
    assert (plan.prediction.verdict, plan.prediction.risks, plan.prediction.safer_with) == ("FITS", (), ())
    for role in ("actor", "reference"):
        assert fullest(plan, role) * MEMORY_BANDS[Kind.SHARDED].high < 79.6
    low, high = plan.prediction.step_seconds_range
    assert low < plan.prediction.step_seconds < high


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo_7b", "dpo_7b", "ppo_7b"])
def test_checkpointing_is_off_only_where_that_saves_more_than_the_error(recipe: str) -> None:
    """Roles that stay side by side get smaller micro-batches after that choice: then the whole step must be shorter."""

    def planned(*pins: str) -> tuple[float, Plan]:
        plan = rlflow.compile(load(f"recipe={recipe}", *pins), "1x8")
        nodes = [node.name for node in plan.graph.nodes if node.role == "actor"]
        return sum(plan.prediction.nodes[node].seconds for node in nodes), plan

    (chosen, plan), (with_it, checkpointed) = planned(), planned("roles.actor.gradient_checkpointing=true")
    layout = plan.roles["actor"].layout
    if layout.stays or checkpointed.roles["actor"].layout.stays:
        assert plan.prediction.step_seconds <= checkpointed.prediction.step_seconds
    else:
        assert layout.gradient_checkpointing or with_it > chosen * (1 + TIME_ERROR)


@pytest.mark.slow
def test_a_pinned_size_may_be_tight() -> None:
    """Micro-batches as large as this need most of what the GPUs have; the change that is proposed makes them safe."""
    pinned = ("recipe=grpo_7b", "roles.actor.micro_batch_tokens=73728", "roles.actor.sequence_parallel_size=1")
    plan = rlflow.compile(load(*pinned), "1x8@l40s")
    assert plan.prediction.verdict == "TIGHT"
    assert any(risk.startswith("actor needs") for risk in plan.prediction.risks)
    safer = plan.prediction.safer_with[0]
    assert safer.startswith("roles.actor.")
    assert rlflow.compile(load(*pinned, *safer.split()), "1x8@l40s").prediction.verdict == "FITS"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cluster", "state_gib"),
    [
        # Masters and moments of AdamW, 12 bytes a parameter, 7.6 and 72.7 billion of them.
        (("recipe=grpo_7b",), "1x1@a100_40gb", 12 * 7.6e9 / 2**30),
        pytest.param(
            ("recipe=grpo_7b", "model@models.policy=qwen2_5_72b"),
            *("1x8", 12 * 72.7e9 / 2**30),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_host_memory_that_nobody_stated(recipe: tuple[str, ...], cluster: str, state_gib: float) -> None:
    plan = rlflow.compile(load(*recipe), cluster)
    assert plan.prediction.verdict == "TIGHT"
    (needed,) = (risk for risk in plan.prediction.risks if "of host memory on host-0" in risk)
    assert float(needed.split()[1]) > state_gib
    assert "TIGHT" in drawn(plan, 100)
    assert "GiB of host memory on host-0; the cluster does not state it" in " ".join(drawn(plan, 100).split())


@pytest.mark.slow
def test_host_memory_that_is_stated() -> None:
    cluster = load_cluster("1x8")
    recipe = load("recipe=grpo_7b", "model@models.policy=qwen2_5_72b")

    def planned(gib: float) -> Plan:
        return rlflow.compile(recipe, replace(cluster, hosts=(replace(cluster.hosts[0], memory_gib=gib),)))

    assert not any("host memory" in risk for risk in planned(2000).prediction.risks)
    with pytest.raises(PlacementError, match="hosts with at least"):
        planned(1000)
