import json
from pathlib import Path

import numpy as np
import pytest

import rlflow
from rlflow.batch import Divergences, Repeated, Rewards, RolloutAdvantages
from rlflow.nodes.base import Node
from rlflow.nodes.kl import adapted_coefficient
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.nodes.reward_shaping import KlPenalty
from rlflow.runtime.graph_runner import NodeState
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load, rollouts, sequences


def state_of(node: Node) -> NodeState:
    state = node.new_state()
    assert state is not None
    return NodeState(state)


OVERRIDES = ["recipe=real", "graph.update.kl_coef=0.1", "graph.update.kl_target=0.002"]


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.5, 1.0), (0.55, 1.01), (0.6, 1.02), (5.0, 1.02), (0.45, 0.99), (0.0, 0.98), (-1.0, 0.98)],
)
def test_the_coefficient_goes_after_the_target(kl: float, factor: float) -> None:
    """A tenth of what it is off 0.5, of which a fifth counts at most."""
    assert adapted_coefficient(0.3, kl, 0.5) == pytest.approx(0.3 * factor)


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_same_coefficients(tmp_path: Path) -> None:
    plan = rlflow.compile(load(*OVERRIDES, "checkpoints.every=1", config_dir=CONFIG_DIR))

    class Watch:
        def __init__(self) -> None:
            self.metrics: list[dict[str, float]] = []

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            self.metrics.append(metrics)

        def __getattr__(self, name: str) -> object:
            return lambda *arguments: None

    whole, first, second = Watch(), Watch(), Watch()
    run(plan, tmp_path / "whole", LocalRuntime(), [whole])  # type: ignore[list-item]
    run(plan, tmp_path / "cut", LocalRuntime(), [first], stop=lambda: len(first.metrics) == 3)  # type: ignore[list-item]
    run(plan, tmp_path / "cut", LocalRuntime(), [second], resume=True)  # type: ignore[list-item]
    coefficients = [step["update/kl_coef"] for step in whole.metrics]
    assert [step["update/kl_coef"] for step in first.metrics + second.metrics] == coefficients
    expected = 0.1
    for step in whole.metrics:
        assert step["update/kl_coef"] == pytest.approx(expected)
        expected = adapted_coefficient(expected, step["update/kl"], 0.002)
    assert len(set(coefficients)) > 3
    saved = tmp_path / "cut" / "checkpoints" / "step-000006" / "graph.update" / "kl_coef.json"
    assert json.loads(saved.read_text()) == pytest.approx(expected)


def test_nothing_trained_on_leaves_the_coefficient() -> None:
    node = PolicyUpdate(kl_coef=0.1, kl_target=2.0)
    state = state_of(node)
    none = RolloutAdvantages(values=Repeated(np.array([np.nan], np.float32), np.array([3])))
    given = rollouts(sequences([2], [[3]]))
    assert state.run(node, engine=None, rollouts=given, advantages=none).values == {"skipped": 1}
    assert state.metrics() == {"kl_coef": 0.1}


def test_a_coefficient_in_the_reward(tmp_path: Path) -> None:
    """The target is compared with the divergence of a whole response."""
    penalty = KlPenalty(kl_coef=0.1, kl_target=2.0)
    state = state_of(penalty)
    rewards = Rewards(values=np.ones(2, np.float32))
    for kl, expected in (([10.0, 20.0], [0.0, -1.0]), ([1.0, 1.0], [1 - 0.102, 1 - 0.102])):
        output = state.run(penalty, rewards=rewards, kl=Divergences(values=np.array(kl, np.float32)))
        assert output.values == pytest.approx(expected)
    state.save(tmp_path)
    other = state_of(penalty)
    other.restore(tmp_path)
    assert other.metrics()["kl_coef"] == pytest.approx(0.102 * 0.98)
