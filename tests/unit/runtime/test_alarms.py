"""Warnings about runs in which nothing is learned."""

import pytest

import rlflow
from rlflow.runtime.alarms import Alarms
from tests.helpers import load

GRAPH = rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu").graph
HEALTHY = {
    "rollouts/finished": 0.9,
    "advantages/zero": 0.5,
    "update/entropy": 1.2,
    "update/kl": 0.01,
    "update/sampler_difference": 0.01,
}


def warned(*steps: dict[str, float]) -> list[str]:
    alarms = Alarms(GRAPH)
    return [warning for step, metrics in enumerate(steps, 1) for warning in alarms.warnings(step, HEALTHY | metrics)]


@pytest.mark.parametrize(
    ("metric", "value", "fact"),
    [
        ("advantages/zero", 1.0, "all responses to each prompt earn the same"),
        ("rollouts/finished", 0.0, "every response is cut at max_tokens"),
        ("update/entropy", 1e-6, "the policy always takes the same tokens"),
        ("update/kl", 12.0, "more than a nat per token away from its reference"),
        ("update/sampler_difference", 0.2, "differ more than by rounding in bfloat16"),
    ],
)
def test_a_value_that_stays_is_told_once(metric: str, value: float, fact: str) -> None:
    bad = {metric: value}
    [warning] = warned({}, *[bad] * 12)
    assert warning.startswith(f"step 6: {metric} is {value:.3g}, after 5 such steps: ")
    assert fact in warning
    assert warned(*[bad] * 4, {}, *[bad] * 4) == [], "it has not stayed"


def test_a_run_that_learns_has_no_alarm() -> None:
    assert warned(*[{}] * 20) == []
