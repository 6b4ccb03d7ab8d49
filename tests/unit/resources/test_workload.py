"""The demands of a step on the roles, by hand."""

from dataclasses import replace

import pytest

from rlflow.resources.layout import Layout
from rlflow.resources.planner.prediction.task_times import decode_profile, task_generation
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency, gpu_speed
from rlflow.resources.time.turns import TurnProfile
from tests.unit.resources.planner.planning import ALL, H100, SEVEN_B, demand, task

LAYOUT, SPEED = Layout(micro_batch_tokens=8192), gpu_speed(H100, 8, Efficiency())
ROLLOUTS = replace(task("rollout", "rollout", "generate"), prompts=Lengths((100.0,)), responses=Lengths((800.0,)))


def seconds(serves: bool = True, kv_tokens: float = 4e5, samples: int = 256, **turns: float) -> float:
    asked = demand("rollout", SEVEN_B, ALL if serves else ALL - {"tensor"})
    rollouts = replace(ROLLOUTS, samples=samples, turns=TurnProfile(**turns))
    return task_generation(asked, rollouts, LAYOUT, SPEED, kv_tokens).seconds


def test_turns_read_only_what_is_new_where_the_engine_caches() -> None:
    profile = TurnProfile(count=4, observation_tokens=50, segments=2)
    assert profile.read_tokens(100, ROLLOUTS.responses, 10, caches=True) == 10 + 100 + 3 * 50
    assert profile.read_tokens(100, ROLLOUTS.responses, 10, caches=False) == 10 + 3 * (100 + 800 / 2 / 2)
    assert seconds(count=4) == pytest.approx(seconds(), rel=1e-3)
    assert seconds(serves=False, count=2) < seconds(serves=False, count=4)


def test_tokens_that_an_agent_adds_are_read_faster_than_generated() -> None:
    assert 0.5 * seconds() < seconds(count=5, observation_tokens=100) < 0.75 * seconds()


def test_segments_are_read_and_trained_with_their_prompts() -> None:
    """Contexts are shorter meanwhile, and so is the sequence that a token is in."""
    rollouts = replace(ROLLOUTS, turns=TurnProfile(count=4, segments=4))
    assert rollouts.tokens == 256 * (4 * 100 + 800)
    assert rollouts.typical_length == 100 + 800 / 4
    assert rollouts.computed_share == pytest.approx(1 - 7 / 8 * 100 / 1200)


def test_waits_are_hidden_as_far_as_other_samples_run_meanwhile() -> None:
    """With few samples waits add up; with twice as many as the engine can generate at once, they take no time."""
    assert seconds(samples=32, count=4, wait_s=5.0) == pytest.approx(seconds(samples=32) + 20, rel=0.02)
    busy = seconds(samples=4096, kv_tokens=1e8)
    assert seconds(samples=4096, kv_tokens=1e8, count=4, wait_s=1.0) == pytest.approx(busy, rel=0.1)


def test_samples_that_wait_take_room_in_the_cache() -> None:
    """Room for 100 samples, half of which wait."""
    assert seconds(samples=400, kv_tokens=5e4, count=4, wait_s=3.0) > 1.5 * seconds(samples=400, kv_tokens=5e4)


def test_the_decode_profile_has_the_waits() -> None:
    """A sample that is generated alone takes its turns and its waits."""
    rollouts = replace(ROLLOUTS, turns=TurnProfile(count=4, wait_s=5.0))
    profile = decode_profile(demand("rollout", SEVEN_B), rollouts, LAYOUT, SPEED, 4e5)
    alone = decode_profile(demand("rollout", SEVEN_B), ROLLOUTS, LAYOUT, SPEED, 4e5)
    assert profile.steps.mean * profile.step_seconds(1) == pytest.approx(800 * alone.step_seconds(1) + 20, rel=0.01)
