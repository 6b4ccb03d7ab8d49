"""Throughput per GPU and idle pools, calculated by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.resources.workload import WeightSync
from rlflow.runtime.measurements import figures_per_gpu

TASKS = [
    SimpleNamespace(node="rollouts", role="rollout"),
    SimpleNamespace(node="rewards", role=None),
    SimpleNamespace(node="update", role="actor"),
]
POOLS = [SimpleNamespace(roles=("rollout",)), SimpleNamespace(roles=("actor", "reference"))]
SECONDS = {"rollouts": 5.0, "rewards": 1.0, "update": 2.0, "copy": 0.5}


def plan(**workload: Any) -> Any:
    weight_syncs = (WeightSync(source="actor", target="rollout"),)
    return SimpleNamespace(
        workload=SimpleNamespace(**{"tasks": TASKS, "weight_syncs": weight_syncs, "ahead": None, **workload}),
        prediction=SimpleNamespace(num_gpus=4, pools=POOLS),
    )


def test_a_weight_sync_keeps_both_pools_busy() -> None:
    """The pools idle for 10 - 5 - 0.5 and 10 - 2 - 0.5 seconds, and 4 GPUs make 800 tokens in 10 seconds."""
    assert figures_per_gpu(plan(), SECONDS, 10.0, 800) == pytest.approx(
        {
            "tokens_per_second_per_gpu": 20.0,
            "pools/rollout/idle_seconds": 4.5,
            "pools/actor-reference/idle_seconds": 7.5,
        }
    )


def test_nodes_of_other_steps_say_nothing_about_this_one() -> None:
    assert figures_per_gpu(plan(ahead="some"), SECONDS, 10.0, 800) == {"tokens_per_second_per_gpu": 20.0}
