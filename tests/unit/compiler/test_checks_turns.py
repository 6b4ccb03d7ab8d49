"""Turns and waits that a recipe expects."""

from dataclasses import replace

import pytest

import rlflow
from rlflow.agents.sources.tools import ToolAgent
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.recipe.compose import load_cluster
from rlflow.resources.time.turns import TurnProfile
from tests.helpers import load


def plan_of(recipe: str, *overrides: str) -> Plan:
    return rlflow.compile(load(f"recipe={recipe}", *overrides), "local")


def turns_of(recipe: str, *overrides: str) -> TurnProfile:
    (generation,) = (task for task in plan_of(recipe, *overrides).workload.tasks if task.kind == "generate")
    return generation.turns


def test_expected_turns_take_the_place_of_the_limit() -> None:
    assert turns_of("guessing_tiny") == TurnProfile(count=3)
    overrides = ("expect.turns=1.5", "expect.wait_s=2", "expect.observation_tokens=3", "expect.segments=1.2")
    expected = TurnProfile(count=1.5, wait_s=2, observation_tokens=3, segments=1.2)
    assert turns_of("guessing_tiny", *overrides) == expected


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("guessing_tiny", "expect.turns=4", r"^expect\.turns: 4 is more than the 3 turns that the graph allows"),
        ("guessing_tiny", "expect.segments=4", r"^expect\.segments: 4 is more than the 3 turns of a response"),
        ("guessing_tiny", "expect.observation_tokens=99", r"^expect\.observation_tokens: 3 turns add 198 tokens"),
        ("grpo_tiny", "expect.turns=2", r"^expect\.turns: no node generates in several turns"),
        ("grpo_tiny", "expect.wait_s=2", r"^expect\.wait_s: no node generates in several turns"),
    ],
)
def test_what_is_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        turns_of(recipe, override)


def test_a_plan_states_the_cores_that_agents_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with fewer cores is a caution."""
    monkeypatch.setattr(ToolAgent, "call_cpu_s", 3.0)
    cluster = load_cluster("local")
    small = replace(cluster, hosts=(replace(cluster.hosts[0], cpus=1),))
    plan = rlflow.compile(load("recipe=tools_tiny"), small)
    rollouts, episodes = plan.prediction.nodes["rollouts"], plan.workload.tasks[0].samples
    assert rollouts.cpu_cores is not None
    cores = rollouts.cpu_cores["host-0"]
    assert cores == pytest.approx(episodes * 2 * 3.0 / rollouts.seconds)
    caution = f"rollouts: agents need {cores:.0f} CPU cores on host-0, which has 1"
    assert any(warning.startswith(caution) for warning in plan.prediction.warnings)
    assert not any("CPU cores" in warning for warning in plan_of("tools_tiny").prediction.warnings)


def test_an_agents_limit_includes_its_prompt() -> None:
    """The model has 256 positions, and prompts of the data up to 24 tokens, which agents put into messages."""
    assert plan_of("tools_tiny", "graph.rollouts.max_tokens=256").workload.tasks[0].longest == 256
    message = r"^graph\.rollouts\.max_tokens: sequences of 257 tokens are longer than the model's 256 positions"
    with pytest.raises(RecipeError, match=message):
        plan_of("tools_tiny", "graph.rollouts.max_tokens=257")
