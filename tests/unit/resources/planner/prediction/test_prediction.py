"""The prediction of a plan."""

import pytest

from rlflow.resources.planner.pools import describe_pools
from rlflow.resources.planner.prediction.prediction import Prediction, predict
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, search


def predicted(longest: int = 4096, hosts: int = 1, samples: int = 1024) -> Prediction:
    demands = [demand("actor", SEVEN_B), demand("reference", SEVEN_B), demand("rollout", SEVEN_B)]
    found = search(demands, cluster(*[8] * hosts), longest=longest, samples=samples)
    placed = found.best()
    assert placed is not None
    return predict(found.inputs, placed)


def test_step_and_throughput_agree() -> None:
    prediction = predicted()
    assert prediction.step_seconds == pytest.approx(max(n.start + n.seconds for n in prediction.nodes.values()))
    tokens = prediction.tokens_per_second_per_gpu * prediction.step_seconds * 8
    # 1024 samples of 410 + 1638 tokens in the mean, to the accuracy of the drawn lengths.
    assert tokens == pytest.approx(1024 * (0.1 + 0.4) * 4096, rel=0.02)


def test_headroom_is_that_of_the_fullest_gpu() -> None:
    prediction = predicted()
    peaks = [gib for of in prediction.memory.values() for gpus in of.peak_gib.values() for gib in gpus.values()]
    assert prediction.headroom_gib == pytest.approx(79.6 - max(peaks))
    for of in prediction.memory.values():
        assert sum(of.phases[of.phase].values()) <= max(gib for gpus in of.peak_gib.values() for gib in gpus.values())


def test_the_first_limit_is_where_planning_with_this_layout_ends() -> None:
    """Pinned to its own layout the plan fits up to the limit it names, and not much beyond."""
    demands = [demand("actor", SEVEN_B, gradient_checkpointing=True, offload="none"), demand("rollout", SEVEN_B)]
    on = cluster(8)
    found = search(demands, on, longest=4096)
    placed = found.best()
    assert placed is not None
    limits = predict(found.inputs, placed).limits
    words = limits[0].split()
    assert words[:3] == ["responses", "longer", "than"]
    assert int(words[3]) > 0.75 * 4096


def test_alternatives_are_slower_or_larger_and_say_by_how_much() -> None:
    prediction = predicted(hosts=2)
    fitting = [a for a in prediction.alternatives if a.step_seconds is not None]
    assert fitting
    assert all(a.step_seconds is not None and a.step_seconds >= prediction.step_seconds * 0.99 for a in fitting)
    assert all(a.loses for a in prediction.alternatives)
    times = [a.step_seconds for a in fitting if a.step_seconds is not None]
    assert times == sorted(times)


def test_warnings() -> None:
    crowded = predicted(longest=16384, samples=8192)
    assert any("the KV cache has room for" in warning for warning in crowded.warnings)
    uneven = predicted(samples=1004)
    assert any("1004 samples are not a multiple of" in warning for warning in uneven.warnings)


def test_describe() -> None:
    assert describe_pools((("actor", "rollout"),), (16,)) == "all roles colocated on 16"
    assert describe_pools((("rollout",), ("actor", "reference")), (4, 12)) == "rollout on 4, actor + reference on 12"
